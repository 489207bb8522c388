"""The `jax` engine: a real decoder-only model trained on any JAX backend."""
