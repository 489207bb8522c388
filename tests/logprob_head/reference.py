"""Log-probs, entropies and gradients in float64 NumPy, written from the formulas alone.

Builds whole [R, T, V] logits and knows no chunk, no device and no jax.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a head gives for one micro-batch; gradients are of sum(a * logprobs + b * entropy)."""

    logprobs: NDArray[np.floating]  # [R, T]
    entropy: NDArray[np.floating]  # [R, T]
    d_hidden: NDArray[np.floating]  # [R, T, D]
    d_table: NDArray[np.floating]  # [V, D]
    d_norm_scale: NDArray[np.floating] | None  # [D]


def reference(
    *,
    hidden: NDArray[np.floating],
    table: NDArray[np.floating],
    targets: NDArray[np.int32],
    norm_scale: NDArray[np.floating] | None,
    a: NDArray[np.floating],
    b: NDArray[np.floating],
    temperature: float,
    final_softcap: float | None,
    norm_eps: float,
) -> Outcome:
    """a, b: [R, T] cotangents of log-probs and entropies."""
    h, w = hidden.astype(np.float64), table.astype(np.float64)
    x = h
    if norm_scale is not None:
        scale = norm_scale.astype(np.float64)
        inverse = 1.0 / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + norm_eps)
        unit = h * inverse
        x = unit * scale
    raw = x @ w.T
    capped = raw if final_softcap is None else final_softcap * np.tanh(raw / final_softcap)
    z = capped / temperature
    peak = z.max(axis=-1, keepdims=True)
    lse = peak + np.log(np.exp(z - peak).sum(axis=-1, keepdims=True))
    log_p = z - lse
    p = np.exp(log_p)
    logprobs = np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    entropy = -(p * log_p).sum(axis=-1)

    # d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
    onehot = np.eye(w.shape[0])[targets]
    dz = a[..., None] * (onehot - p) - b[..., None] * p * (log_p + entropy[..., None])
    draw = dz / temperature
    if final_softcap is not None:
        draw = draw * (1.0 - np.tanh(raw / final_softcap) ** 2)
    d_table = np.einsum("rtv,rtd->vd", draw, x)
    dx = draw @ w
    if norm_scale is None:
        return Outcome(
            logprobs=logprobs, entropy=entropy, d_hidden=dx, d_table=d_table, d_norm_scale=None
        )
    d_unit = dx * scale
    mean = np.mean(d_unit * unit, axis=-1, keepdims=True)
    return Outcome(
        logprobs=logprobs,
        entropy=entropy,
        d_hidden=inverse * (d_unit - unit * mean),
        d_table=d_table,
        d_norm_scale=(dx * unit).sum(axis=(0, 1)),
    )
