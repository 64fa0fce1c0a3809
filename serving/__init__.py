"""The gRPC server: requests of many users decoded together on one engine."""

MAX_MESSAGE_BYTES = 256 * 2**20  # of a gRPC message, both ways
