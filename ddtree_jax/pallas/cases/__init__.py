"""Real shapes of every operation, as `Case`s: one module an operation, each with `CASES`."""
