"""From the configured mode to a head, with the reason logged when it is not the one asked for.

Decides on shapes and the mesh only, at trace time (so one line a compile); computes no log-prob.
"""

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from trainer_worker.logprob_head.chunked import chunked_head
from trainer_worker.logprob_head.chunks import Chunks
from trainer_worker.logprob_head.config import HeadConfig, HeadConfigError, HeadMode, TokenLogprobs
from trainer_worker.logprob_head.layout import Layout, Misfit, fit_layout
from trainer_worker.logprob_head.local import local_head
from trainer_worker.logprob_head.vocab import vocab_head

_log = logging.getLogger(__name__)


def token_logprobs(
    hidden: jax.Array,
    table: jax.Array | None,
    targets: jax.Array,
    config: HeadConfig,
    norm_scale: jax.Array | None = None,
) -> TokenLogprobs:
    """Log-prob and entropy of every token, without ever holding [R, T, V] logits.

    hidden: floating [R, T, D]. With `norm_scale` it is the input of the model's final RMSNorm,
        which the head then applies; without, its output.
    table: floating [V, D], cast to the compute dtype. None: `hidden` already holds raw logits and
        D is the vocabulary (such a head reads no model state).
    targets: int32 [R, T]; position t holds the id that hidden[:, t] predicts, shifted by the caller
        over the whole row (a shift inside a device's tokens would lose one at each seam).
    norm_scale: floating [D].

    Returns float32 [R, T] log-probs, `log softmax(cap(hidden @ table.T) / temperature)[target]`,
    and entropies of the same distribution. Differentiable in hidden, table and norm_scale, through
    both results.

    What the caller must see to: ids are not checked here, as no error can be raised from compiled
    code. An id outside [0, V) gives a NaN log-prob (never a wrapped or clipped id's) and no
    gradient. A token with a non-finite raw logit gives NaN for both results. A NaN or infinite
    hidden state makes the gradients of table and norm_scale NaN in every head, even at a token
    whose loss weight is 0: zero hidden states (not results) at padding with `jnp.where`.

    Raises HeadConfigError for shapes that do not match, for an Explicit mesh axis, and for a
    sharded mode inside another shard_map.
    """
    _check_shapes(hidden, table, targets, norm_scale)
    mesh = jax.sharding.get_abstract_mesh()
    _check_axis_types(mesh, config)
    if config.mode == "off":
        return chunked_head(hidden, table, targets, norm_scale, config)
    choice = choose_head(
        mesh,
        config,
        tokens=targets.shape,
        table=None if table is None else table.shape,
        norm_scale=None if norm_scale is None else norm_scale.shape,
    )
    if isinstance(choice, Misfit) or table is None:
        reason = choice.reason if isinstance(choice, Misfit) else "the head reads no model state"
        _log.warning("[logps-head] sharded head off, using the chunked head: %s", reason)
        return chunked_head(hidden, table, targets, norm_scale, config)
    _log.info("[logps-head] sharded head %s", choice.summary(config))
    head = vocab_head if choice.mode == "vocab" else local_head
    return head(hidden, table, targets, norm_scale, config, choice.layout)


@dataclass(frozen=True, kw_only=True)
class HeadCost:
    """Bytes that one device receives per micro-batch, forward and backward, by either head."""

    local_bytes: float
    vocab_bytes: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A sharded head that fits: which, on what layout, and why when the rule chose."""

    mode: HeadMode
    layout: Layout
    vocab: int
    why: str

    def summary(self, config: HeadConfig) -> str:
        """One line for the log."""
        layout = self.layout
        shared = self.mode == "vocab"
        tokens = layout.local_tokens * (layout.token_ranks if shared else 1)
        ids = f" x {self.vocab // layout.token_ranks} of {self.vocab} ids" if shared else ""
        chunks = Chunks.fit(tokens, config.chunk_tokens)
        return (
            f"{self.mode}: {self.why}rows over {layout.row_axes}, tokens over {layout.token_axes},"
            f" {layout.local_rows}x{tokens} local tokens{ids} in {chunks.steps} steps of"
            f" {chunks.chunk_tokens}"
        )


def choose_head(
    mesh: AbstractMesh,
    config: HeadConfig,
    *,
    tokens: tuple[int, ...],
    table: tuple[int, ...] | None,
    norm_scale: tuple[int, ...] | None,
) -> Choice | Misfit:
    """The sharded head for these shapes ([R, T], [V, D], [D]), or why the chunked head must run.

    `auto` compares the bytes that one device receives per micro-batch (`head_cost`) and takes the
    vocab-parallel head when it fits and receives fewer; up to per-token scalars that is when

        token_ranks * tokens_per_device < V * (1 - 1 / devices)

    where tokens_per_device = R * T / devices. With the ranks free, (V / g + g * tokens_per_device)
    is least at g = sqrt(V / tokens_per_device).
    """
    if mesh.empty:
        return Misfit(reason="no mesh is set (jax.set_mesh)")
    if table is None:
        return Misfit(reason="the head reads no model state (no table)")
    layout = fit_layout(mesh, config, rows=tokens[0], tokens=tokens[1])
    if isinstance(layout, Misfit):
        return layout
    for name, shape in (("table", table), ("norm_scale", norm_scale)):
        if shape is not None and layout.split_dimension(shape) is None:
            return Misfit(
                reason=f"head parameter {name} {shape} has no dimension divisible by the"
                f" {layout.devices} devices"
            )
    if config.mode == "local":
        return Choice(mode="local", layout=layout, vocab=table[0], why="")
    misfit = _vocab_misfit(layout, table)
    if config.mode == "vocab":
        return misfit or Choice(mode="vocab", layout=layout, vocab=table[0], why="")
    if misfit is not None:
        why = f"auto, as {misfit.reason}; "
        return Choice(mode="local", layout=layout, vocab=table[0], why=why)
    cost = head_cost(layout, table=table, compute_bytes=np.dtype(config.compute_dtype).itemsize)
    return Choice(
        mode="vocab" if cost.vocab_bytes < cost.local_bytes else "local",
        layout=layout,
        vocab=table[0],
        why=f"auto, receives {cost.local_bytes:.3g} bytes local, {cost.vocab_bytes:.3g} vocab; ",
    )


def head_cost(layout: Layout, *, table: tuple[int, ...], compute_bytes: int) -> HeadCost:
    """Bytes received by one device per micro-batch, with N devices, g token ranks, t tokens per
    device, b bytes per element of the compute dtype, and ring collectives:

        local = V D (b + 4) (1 - 1/N)                    gather in b bytes, reduction in float32
        vocab = local / g                                the same for a slice of the table
              + (g - 1) t D (b + 4)                      operands gathered, their gradients reduced
              + (g - 1) t (4 + 8 + 2 * 5 * 4)            ids, cotangents, five sums per token

    A reduce-scatter that the compiler makes an all-reduce with a slice doubles both reductions.
    """
    vocab, features = table
    g = layout.token_ranks
    tokens = layout.local_rows * layout.local_tokens
    local = vocab * features * (compute_bytes + 4) * (1 - 1 / layout.devices)
    moved = (g - 1) * tokens * (features * (compute_bytes + 4) + 52)
    return HeadCost(local_bytes=local, vocab_bytes=local / g + moved)


def _vocab_misfit(layout: Layout, table: tuple[int, ...]) -> Misfit | None:
    if layout.token_ranks == 1:
        return Misfit(reason="no token layout fits the vocab head: tokens are not split")
    if table[0] % layout.token_ranks:
        return Misfit(
            reason=f"vocabulary {table[0]} is not divisible by the {layout.token_ranks} devices of"
            f" {layout.token_axes}"
        )
    if layout.split_dimension(table) != 1:
        return Misfit(
            reason=f"features {table[1]} are not divisible by the {layout.devices} devices"
        )
    return None


def _check_axis_types(mesh: AbstractMesh, config: HeadConfig) -> None:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = [axis for axis, kind in types.items() if kind == AxisType.Explicit]
    if explicit:
        raise HeadConfigError(
            f"mesh axes {explicit} are Explicit (what jax.make_mesh makes by default): build the"
            f" mesh with axis_types=(AxisType.Auto,) * {len(types)}"
        )
    manual = [axis for axis, kind in types.items() if kind == AxisType.Manual]
    if manual and config.mode != "off":
        raise HeadConfigError(
            f"mode {config.mode!r} inside a shard_map over {manual}: call the head outside it, or"
            " with mode='off'"
        )


def _check_shapes(
    hidden: jax.Array,
    table: jax.Array | None,
    targets: jax.Array,
    norm_scale: jax.Array | None,
) -> None:
    if hidden.ndim != 3:
        raise HeadConfigError(f"hidden has shape {hidden.shape}: give [rows, tokens, features]")
    if not jnp.issubdtype(hidden.dtype, jnp.floating):
        raise HeadConfigError(f"hidden has dtype {hidden.dtype}: give a floating dtype")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise HeadConfigError(f"targets have dtype {targets.dtype}: give int32 ids")
    if targets.shape != hidden.shape[:2]:
        raise HeadConfigError(
            f"targets have shape {targets.shape}, hidden {hidden.shape}: give one id per token"
        )
    if table is not None and (table.ndim != 2 or table.shape[1] != hidden.shape[2]):
        raise HeadConfigError(
            f"table has shape {table.shape}, hidden {hidden.shape}: give [vocab, features]"
        )
    if norm_scale is not None and norm_scale.shape != hidden.shape[2:]:
        raise HeadConfigError(
            f"norm_scale has shape {norm_scale.shape}, hidden {hidden.shape}: give [features]"
        )
