"""Device kernels and their plain-XLA twins, one operation per module."""
