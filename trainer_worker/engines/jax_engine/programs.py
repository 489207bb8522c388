"""The compiled programs of a run: everything a step executes, compiled ahead of time.

A step runs nothing else: no `jnp` operation outside these programs, which would compile on its
first use. Staged and unstaged inputs go through the same executables, so the order of staging
cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding

from prestage.microbatch import FIELDS
from trainer_worker.engine import CompileSpec
from trainer_worker.engines.jax_engine.config import DROPLESS, EngineConfig, OptimizerConfig
from trainer_worker.engines.jax_engine.loss import (
    SUM_NAMES,
    loss_sums,
    predicts,
    shifted,
    target_weights,
)
from trainer_worker.engines.jax_engine.mesh import Placement
from trainer_worker.engines.jax_engine.model import (
    Decoded,
    Params,
    decode,
    final_norm,
    head_table,
    join_blocks,
    split_blocks,
)
from trainer_worker.engines.jax_engine.moe import Buffers
from trainer_worker.logprob_head import HeadConfig, TokenLogprobs, token_logprobs

MARKER: Final = ("loss", "denominator", "dropped_assignments")
"""The numbers that a micro-batch's program reports besides the sums, f32, in order."""
LOSS: Final = SUM_NAMES.index("loss")
DENOMINATOR: Final = SUM_NAMES.index("denominator")
DROPPED: Final = MARKER.index("dropped_assignments")
UPDATE_METRICS: Final = ("grad_norm", "update_norm", "learning_rate", "applied")
"""Names of the numbers that an update reports, in order."""
GRAD_NORM: Final = UPDATE_METRICS.index("grad_norm")
EVALUATE_SUMS: Final = ("logprob", "entropy", "tokens")
SCORE_FIELDS: Final = ("tokens", "segment_ids", "positions")

Batch = Mapping[str, Array]


class State(NamedTuple):
    """What an update changes. All on the device."""

    params: Params  # f32 masters.
    optimizer: optax.OptState
    updates: Array  # int32 scalar: updates applied, which the learning-rate schedule follows.


class Sums(NamedTuple):
    """What micro-batches of a step add up to. All on the device."""

    gradients: Params  # f32, of the unreduced sum.
    totals: Array  # f32, in the order of SUM_NAMES.


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Executables. Donated arguments are marked *."""

    fwd_bwd: jax.stages.Compiled  # (params, sums*, batch) -> (sums, marker)
    # The same without drops, for what overflowed; None where nothing is run again.
    dropless: jax.stages.Compiled | None
    update: jax.stages.Compiled  # (state*, sums*) -> (state, zero sums, f32 metrics, totals)
    zero: jax.stages.Compiled  # () -> zero sums
    score: jax.stages.Compiled  # (params, batch) -> f32 log-probs [R, T], token-aligned
    evaluate: jax.stages.Compiled  # (params, batch) -> f32 sums in the order of EVALUATE_SUMS


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW's direction; clipping and the learning rate are the update program's."""
    return optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay),
    )


def first_state(config: EngineConfig, params: Params) -> State:
    """The state before the first update. Traceable."""
    optimizer = make_optimizer(config.optimizer).init(params)
    return State(params=params, optimizer=optimizer, updates=jnp.zeros((), jnp.int32))


def _zero_sums(params: Params) -> Sums:
    gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return Sums(gradients=gradients, totals=jnp.zeros((len(SUM_NAMES),), jnp.float32))


def _decoded(config: EngineConfig, params: Params, batch: Batch, factor: float) -> Decoded:
    buffers = Buffers(factor=factor, exclude_padding=config.exclude_padding_from_routing)
    return decode(config.model, params, batch, buffers)


def _predicted(
    config: EngineConfig, params: Params, hidden: Array, tokens: Array, needed: Array
) -> TokenLogprobs:
    """Log-prob and entropy of each predicted token `[R, T]`; anything where not `needed`."""
    head = HeadConfig(
        chunk_tokens=config.logprob_chunk,
        compute_dtype=config.model.compute_dtype,
        norm_eps=config.model.norm_eps,
        mode=config.head_mode,
    )
    table, scale, targets = head_table(params), final_norm(params), shifted(tokens)
    if config.skips_prompts:
        return _score_needed(head, hidden, table, scale, targets, needed)
    return token_logprobs(hidden, table, targets, head, norm_scale=scale)


def _score_needed(
    head: HeadConfig, hidden: Array, table: Array, scale: Array, targets: Array, needed: Array
) -> TokenLogprobs:
    """The head over chunks with a needed token only; 0 elsewhere.

    Needed tokens are moved to the front of their row first, so that few chunks have one: in RL
    most tokens are prompt or padding, and the vocabulary product is most of a small model's work.
    """
    order = jnp.argsort(~needed, axis=1, stable=True)
    chunk = min(head.chunk_tokens, hidden.shape[1])

    def parts(x: Array) -> Array:
        return split_blocks(jnp.take_along_axis(x, order, axis=1), chunk)

    @jax.checkpoint
    def step(
        table: Array, scale: Array, hidden: Array, targets: Array, needed: Array
    ) -> TokenLogprobs:
        def skipped() -> TokenLogprobs:
            zeros = jnp.zeros(targets.shape, jnp.float32)
            return TokenLogprobs(logprobs=zeros, entropy=zeros)

        def scored() -> TokenLogprobs:
            return token_logprobs(hidden, table, targets, head, norm_scale=scale)

        found: TokenLogprobs = jax.lax.cond(jnp.any(needed), scored, skipped)
        return found

    def body(carry: None, part: tuple[Array, Array, Array]) -> tuple[None, TokenLogprobs]:
        return carry, step(table, scale, *part)

    chosen = split_blocks(jnp.take_along_axis(hidden, order[..., None], axis=1), chunk)
    _, found = jax.lax.scan(body, None, (chosen, parts(targets), parts(needed)))
    back = jnp.argsort(order, axis=1)

    def put_back(x: Array) -> Array:
        return jnp.take_along_axis(join_blocks(x, hidden.shape[1]), back, axis=1)

    return TokenLogprobs(logprobs=put_back(found.logprobs), entropy=put_back(found.entropy))


def _loss(
    config: EngineConfig, params: Params, batch: Batch, factor: float
) -> tuple[Array, tuple[Array, Array]]:
    """(loss to differentiate, (sums, assignments dropped))."""
    decoded = _decoded(config, params, batch, factor)
    needed = target_weights(batch) > 0
    scored = _predicted(config, params, decoded.hidden, batch["tokens"], needed)
    loss, totals = loss_sums(config.loss, scored.logprobs, scored.entropy, batch)
    return loss, (totals, decoded.dropped)


def _fwd_bwd(
    config: EngineConfig, params: Params, sums: Sums, batch: Batch, factor: float
) -> tuple[Sums, Array]:
    """Adds this micro-batch to the sums; what will be run again adds nothing."""
    (_, (totals, dropped)), new = jax.value_and_grad(
        lambda p: _loss(config, p, batch, factor), has_aux=True
    )(params)
    gradients = jax.tree.map(lambda old, g: old + g.astype(jnp.float32), sums.gradients, new)
    marker = jnp.stack([totals[LOSS], totals[DENOMINATOR], dropped.astype(jnp.float32)])
    added = Sums(gradients=gradients, totals=sums.totals + totals)
    if config.retry_when_tokens_dropped and factor != DROPLESS:
        added = jax.tree.map(lambda new, old: jnp.where(dropped == 0, new, old), added, sums)
    return added, marker


def _global_norm(tree: Params) -> Array:
    return jnp.sqrt(jnp.stack([jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)]).sum())


def learning_rate(config: OptimizerConfig, updates: Array) -> Array:
    """Of the next update, after `updates` of them. Linear warm-up that starts above 0."""
    rate = jnp.asarray(config.learning_rate, jnp.float32)
    if not config.warmup_steps:
        return rate
    return rate * jnp.minimum(1.0, (updates + 1) / config.warmup_steps)


def _update(config: EngineConfig, state: State, sums: Sums) -> tuple[State, Sums, Array, Array]:
    """One division by the step's denominator, clipping, AdamW.

    The parameters stay, bit for bit, when the denominator is 0 or a gradient is not finite.
    """
    denominator = sums.totals[DENOMINATOR]
    divisor = jnp.where(denominator > 0, denominator, 1.0)
    gradients = jax.tree.map(lambda g: g / divisor, sums.gradients)
    norm = _global_norm(gradients)
    applied = (denominator > 0) & jnp.isfinite(norm)
    if config.optimizer.max_grad_norm:
        factor = jnp.minimum(1.0, config.optimizer.max_grad_norm / jnp.maximum(norm, 1e-30))
        gradients = jax.tree.map(lambda g: g * factor, gradients)
    optimizer = make_optimizer(config.optimizer)
    direction, moments = optimizer.update(gradients, state.optimizer, state.params)
    rate = learning_rate(config.optimizer, state.updates)
    steps = jax.tree.map(lambda d: -rate * d, direction)
    new = State(
        params=jax.tree.map(jnp.add, state.params, steps),
        optimizer=moments,
        updates=state.updates + 1,
    )
    chosen: State = jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, state)
    step_norm = jnp.where(applied, _global_norm(steps), 0.0)
    metrics = jnp.stack([norm, step_norm, rate, applied.astype(jnp.float32)])
    return chosen, _zero_sums(state.params), metrics, sums.totals


def _score(config: EngineConfig, params: Params, batch: Batch) -> Array:
    needed = predicts(batch["segment_ids"])
    hidden = _decoded(config, params, batch, DROPLESS).hidden
    predicted = _predicted(config, params, hidden, batch["tokens"], needed).logprobs
    return jnp.roll(jnp.where(needed, predicted, 0.0), 1, axis=1)


def _evaluate(config: EngineConfig, params: Params, batch: Batch) -> Array:
    weights = target_weights(batch)
    hidden = _decoded(config, params, batch, DROPLESS).hidden
    scored = _predicted(config, params, hidden, batch["tokens"], weights > 0)
    return jnp.stack(
        [
            jnp.sum(jnp.where(weights > 0, scored.logprobs, 0.0)),
            jnp.sum(jnp.where(weights > 0, scored.entropy, 0.0)),
            jnp.sum(weights),
        ]
    )


def score_fields(fields: Iterable[str]) -> tuple[str, ...]:
    """What scoring reads of a micro-batch with these fields."""
    return (*SCORE_FIELDS, *(name for name in fields if name == "routed_experts"))


def field_shape(config: EngineConfig, spec: CompileSpec, name: str) -> tuple[int, ...]:
    """Shape of one field of a micro-batch."""
    shape = (spec.rows, spec.tokens_per_row)
    if name != "routed_experts" or config.model.moe is None:
        return shape
    return (*shape, config.model.moe_layers, config.model.moe.top_k)


def batch_shapes(config: EngineConfig, spec: CompileSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract arrays of one micro-batch."""
    return {
        name: jax.ShapeDtypeStruct(field_shape(config, spec, name), FIELDS[name].dtype)
        for name in spec.fields
    }


def compile_programs(config: EngineConfig, state: State, spec: CompileSpec) -> Programs:
    """Compile every program of a run for one micro-batch shape, on the config's mesh."""
    place = Placement.of(config.mesh)
    aval = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), state)
    sums = jax.eval_shape(_zero_sums, aval.params)
    at, sums_at = place.tree(aval), place.tree(sums)
    whole = place.replicated
    batch = batch_shapes(config, spec)
    scored = {name: batch[name] for name in score_fields(spec.fields)}
    evaluated = {name: batch[name] for name in (*scored, "loss_mask")}

    def fwd_bwd(factor: float) -> jax.stages.Compiled:
        def program(params: Params, sums: Sums, batch: Batch) -> tuple[Sums, Array]:
            return _fwd_bwd(config, params, sums, batch, factor)

        jitted = jax.jit(
            program,
            donate_argnums=1,
            in_shardings=(at.params, sums_at, inputs(batch)),
            out_shardings=(sums_at, whole),
        )
        return jitted.lower(aval.params, sums, batch).compile()

    def update(state: State, sums: Sums) -> tuple[State, Sums, Array, Array]:
        return _update(config, state, sums)

    def zero() -> Sums:
        return _zero_sums(aval.params)

    def score(params: Params, batch: Batch) -> Array:
        return _score(config, params, batch)

    def evaluate(params: Params, batch: Batch) -> Array:
        return _evaluate(config, params, batch)

    def inputs(avals: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, NamedSharding]:
        return dict.fromkeys(avals, place.inputs)

    with jax.set_mesh(place.mesh), jax.default_matmul_precision(config.matmul_precision):
        return Programs(
            fwd_bwd=fwd_bwd(config.ragged_buffer_factor),
            dropless=fwd_bwd(DROPLESS) if config.retry_when_tokens_dropped else None,
            update=jax.jit(
                update,
                donate_argnums=(0, 1),
                in_shardings=(at, sums_at),
                out_shardings=(at, sums_at, whole, whole),
            )
            .lower(aval, sums)
            .compile(),
            zero=jax.jit(zero, out_shardings=sums_at).lower().compile(),
            score=jax.jit(score, in_shardings=(at.params, inputs(scored)), out_shardings=whole)
            .lower(aval.params, scored)
            .compile(),
            evaluate=jax.jit(
                evaluate, in_shardings=(at.params, inputs(evaluated)), out_shardings=whole
            )
            .lower(aval.params, evaluated)
            .compile(),
        )
