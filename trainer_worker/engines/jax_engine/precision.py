"""The layers' dense products: masters are f32, products are in the compute dtype, and a gradient is
cast back to f32 before or after it is summed over tokens and devices.

Before (the default) is exact in the sum: the product accumulates in f32 and devices exchange f32.
After (`cast_grads_after_all_reduce`) sums in the compute dtype: half the bytes between devices, and
one rounding to the compute dtype. With f32 compute both are the same. Knows no layer and no loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer_worker.engines.jax_engine.mesh import WHOLE, constrain


def gathered(master: Array, like: Array) -> Array:
    """A master weight in the dtype of `like`, gathered from the devices that share it out."""
    return constrain(master.astype(like.dtype), WHOLE)


@jax.custom_vjp
def _summed_in_f32(x: Array, master: Array) -> Array:
    return x @ gathered(master, x)


def _forward(x: Array, master: Array) -> tuple[Array, tuple[Array, Array]]:
    return _summed_in_f32(x, master), (x, master)


def _backward(kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, master = kept
    over = tuple(range(x.ndim - 1))  # Rows and tokens.
    by_master = lax.dot_general(
        x, cotangent, ((over, over), ((), ())), preferred_element_type=jnp.float32
    )
    return cotangent @ gathered(master, x).T, by_master


_summed_in_f32.defvjp(_forward, _backward)


def dense(x: Array, master: Array, *, cast_after: bool) -> Array:
    """`x [..., in] @ master [in, out]` in the dtype of `x`; the gradient of `master` is f32.

    `cast_after`: sum that gradient in the dtype of `x`, and cast it then.
    """
    if cast_after or x.dtype == master.dtype:
        return x @ gathered(master, x)
    return _summed_in_f32(x, master)
