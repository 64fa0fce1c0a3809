"""Device operations that choose between implementations. So far: exact top-K over the vocabulary, in plain XLA."""
