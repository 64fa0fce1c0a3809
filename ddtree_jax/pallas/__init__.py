"""Operations with several implementations: GPU kernels and their plain-JAX references. `api` is the table."""
