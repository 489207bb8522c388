"""Cutting the token dimension into the steps of a scan, and putting the results back.

Padding added here never reaches a caller: `join` drops it, so its cotangent is zero.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """A token dimension of `tokens`, cut into `steps` of `chunk_tokens`; the last may be padded."""

    tokens: int
    chunk_tokens: int

    @classmethod
    def fit(cls, tokens: int, chunk_tokens: int) -> "Chunks":
        """Chunks of at most chunk_tokens; a chunk larger than the dimension is clipped to it."""
        return cls(tokens=tokens, chunk_tokens=max(1, min(tokens, chunk_tokens)))

    @property
    def steps(self) -> int:
        """Scan steps."""
        return -(-self.tokens // self.chunk_tokens)

    def split(self, x: jax.Array) -> jax.Array:
        """[R, T, ...] -> [steps, R, chunk_tokens, ...], zero-padded at the end."""
        spare = self.steps * self.chunk_tokens - self.tokens
        if spare:
            x = jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], self.steps, self.chunk_tokens, *x.shape[2:])
        return jnp.swapaxes(x, 0, 1)

    def join(self, x: jax.Array) -> jax.Array:
        """[steps, R, chunk_tokens, ...] -> [R, T, ...], padding dropped."""
        x = jnp.swapaxes(x, 0, 1)
        x = x.reshape(x.shape[0], self.steps * self.chunk_tokens, *x.shape[3:])
        return x[:, : self.tokens]
