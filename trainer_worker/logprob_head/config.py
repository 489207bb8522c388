"""What a log-prob head is asked for and what it returns.

Plain values only: nothing here touches a device or knows which head will run.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax

HeadMode = Literal["off", "local", "vocab", "auto"]
ComputeDtype = Literal["float32", "bfloat16"]


class HeadConfigError(ValueError):
    """A head was asked for something it cannot do; the message names the value and the fix."""


class TokenLogprobs(NamedTuple):
    """Per-token results. A NamedTuple, so that it passes through jit and grad as a pytree.

    logprobs: float32 [R, T], natural log of p(targets[r, t] | hidden[r, t]).
    entropy: float32 [R, T], entropy in nats of the same distribution, after soft-cap and temperature.
    """

    logprobs: jax.Array
    entropy: jax.Array


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Settings of the log-prob head. Hashable, so it can be a static jit argument.

    chunk_tokens: tokens of each row scored in one step of the scan; clipped to the tokens there are.
    temperature: logits are divided by it, after the soft-cap.
    final_softcap: logits become cap * tanh(logits / cap); None means no cap.
    mode: "off" = chunked head; "local", "vocab" = one sharded head; "auto" = the cheaper of the two.
    compute_dtype: dtype of the matmul operands; sums are always float32. A float32 matmul runs at
        jax's matmul precision, which on TPU and GPU is lower by default: wrap the call in
        jax.default_matmul_precision("highest") where full float32 is meant.
    norm_eps: added to the mean square when norm_scale is given.
    row_axes, token_axes: mesh axes that hold the rows and the tokens of each row, major first.
    """

    chunk_tokens: int
    temperature: float = 1.0
    final_softcap: float | None = None
    mode: HeadMode = "off"
    compute_dtype: ComputeDtype = "float32"
    norm_eps: float = 1e-6
    row_axes: tuple[str, ...] = ("fsdp", "expert")
    token_axes: tuple[str, ...] = ("context",)

    def __post_init__(self) -> None:
        """Raises HeadConfigError for a value that no head can honour."""
        if self.chunk_tokens < 1:
            raise HeadConfigError(
                f"chunk_tokens is {self.chunk_tokens}: give 1 or more tokens per step"
                " (to turn the sharded head off, set mode='off')"
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise HeadConfigError(
                f"temperature is {self.temperature}: give a finite number above 0"
            )
        cap = self.final_softcap
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            raise HeadConfigError(
                f"final_softcap is {cap}: give a finite number above 0, or None for no cap"
            )
        if not (math.isfinite(self.norm_eps) and self.norm_eps >= 0):
            raise HeadConfigError(f"norm_eps is {self.norm_eps}: give a finite number, 0 or more")
        if self.mode not in get_args(HeadMode):
            raise HeadConfigError(f"mode is {self.mode!r}: give one of {get_args(HeadMode)}")
        if self.compute_dtype not in get_args(ComputeDtype):
            raise HeadConfigError(
                f"compute_dtype is {self.compute_dtype!r}: give one of {get_args(ComputeDtype)}"
            )
        axes = (*self.row_axes, *self.token_axes)
        if len(set(axes)) != len(axes):
            raise HeadConfigError(
                f"row_axes {self.row_axes} and token_axes {self.token_axes} name an axis twice:"
                " each mesh axis holds rows or tokens, not both"
            )
