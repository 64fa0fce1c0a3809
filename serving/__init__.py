"""The gRPC server: requests of many users decoded together on one engine."""
