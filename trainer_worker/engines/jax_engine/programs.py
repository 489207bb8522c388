"""The compiled programs of a run: everything a step executes, compiled ahead of time.

A step runs nothing else: no `jnp` operation outside these programs, which would compile on its
first use. Staged and unstaged inputs go through the same executables, so the order of staging
cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from prestage.microbatch import FIELDS
from trainer_worker.engine import CompileSpec
from trainer_worker.engines.jax_engine.config import EngineConfig, OptimizerConfig
from trainer_worker.engines.jax_engine.loss import SUM_NAMES, loss_sums, shifted, target_weights
from trainer_worker.engines.jax_engine.model import (
    Params,
    final_norm,
    head_table,
    hidden_states,
)
from trainer_worker.logprob_head import HeadConfig, token_logprobs

DENOMINATOR: Final = SUM_NAMES.index("denominator")
UPDATE_METRICS: Final = ("grad_norm", "update_norm", "learning_rate", "applied")

# A JAX pytree; its structure is the model's.
Tree = Any


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Executables. `state` is (params, optimizer state); `sums` is (gradients, f32 vector)."""

    fwd_bwd: jax.stages.Compiled  # (params, sums, batch) -> (sums, scalar to wait for)
    update: jax.stages.Compiled  # (state, sums) -> (state, zero sums, f32 metrics, sums vector)
    reset: jax.stages.Compiled  # (sums) -> zero sums
    score: jax.stages.Compiled  # (params, batch) -> log-probs [R, T], token-aligned
    evaluate: jax.stages.Compiled  # (params, batch) -> f32 vector of sums


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW on f32 masters; clipping is part of the update program."""
    schedule: optax.Schedule = optax.constant_schedule(config.learning_rate)
    if config.warmup_steps:
        schedule = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )


def zero_sums(params: Tree) -> Tree:
    """Empty accumulators for these parameters."""
    gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return gradients, jnp.zeros((len(SUM_NAMES),), jnp.float32)


def _predicted(config: EngineConfig, params: Params, batch: Mapping[str, Array]) -> Tree:
    hidden = hidden_states(
        config.model, params, batch["tokens"], batch["positions"], batch["segment_ids"]
    )
    head = HeadConfig(
        chunk_tokens=config.logprob_chunk,
        compute_dtype=config.model.compute_dtype,
        norm_eps=config.model.norm_eps,
        mode=config.head_mode,
    )
    return token_logprobs(
        hidden,
        head_table(params),
        shifted(batch["tokens"]),
        head,
        norm_scale=final_norm(params),
    )


def _loss(config: EngineConfig, params: Tree, batch: Mapping[str, Array]) -> tuple[Array, Array]:
    scored = _predicted(config, params, batch)
    return loss_sums(config.loss, scored.logprobs, scored.entropy, batch)


def _fwd_bwd(config: EngineConfig, params: Tree, sums: Tree, batch: Tree) -> Tree:
    gradient, total = sums
    (_, vector), new = jax.value_and_grad(lambda p: _loss(config, p, batch), has_aux=True)(params)
    gradient = jax.tree.map(lambda old, g: old + g.astype(jnp.float32), gradient, new)
    total = total + vector
    return (gradient, total), total[DENOMINATOR] * 1.0


def _update(
    config: EngineConfig, optimizer: optax.GradientTransformation, state: Tree, sums: Tree
) -> Tree:
    params, optimizer_state = state
    gradient, total = sums
    denominator = total[DENOMINATOR]
    applied = denominator > 0
    gradient = jax.tree.map(lambda g: g / jnp.where(applied, denominator, 1.0), gradient)
    norm = optax.global_norm(gradient)
    if config.optimizer.max_grad_norm:
        factor = jnp.minimum(1.0, config.optimizer.max_grad_norm / jnp.maximum(norm, 1e-30))
        gradient = jax.tree.map(lambda g: g * factor, gradient)
    steps, new_state = optimizer.update(gradient, optimizer_state, params)
    new_params = optax.apply_updates(params, steps)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(applied, new, old)

    params = jax.tree.map(choose, new_params, params)
    optimizer_state = jax.tree.map(choose, new_state, optimizer_state)
    update_norm = jnp.where(applied, optax.global_norm(steps), 0.0)
    rate = jnp.asarray(config.optimizer.learning_rate, jnp.float32)
    metrics = jnp.stack([norm, update_norm, rate, applied.astype(jnp.float32)])
    return (params, optimizer_state), zero_sums(params), metrics, total * 1.0


def _score(config: EngineConfig, params: Tree, batch: Tree) -> Array:
    predicted = _predicted(config, params, batch).logprobs
    segments = batch["segment_ids"]
    inside = (shifted(segments) == segments) & (segments != 0)
    aligned = jnp.roll(jnp.where(inside.at[:, -1].set(False), predicted, 0.0), 1, axis=1)
    return aligned


def _evaluate(config: EngineConfig, params: Tree, batch: Tree) -> Array:
    scored = _predicted(config, params, batch)
    weights = target_weights(batch)
    total = jnp.sum(weights)
    return jnp.stack(
        [
            jnp.sum(jnp.where(weights > 0, scored.logprobs, 0.0)),
            jnp.sum(jnp.where(weights > 0, scored.entropy, 0.0)),
            total,
        ]
    )


def batch_shapes(spec: CompileSpec, routing: tuple[int, ...] = ()) -> dict[str, Tree]:
    """Abstract arrays of one micro-batch."""
    shapes = {}
    for name in spec.fields:
        field = FIELDS[name]
        trailing = routing if field.trailing_dims else ()
        shapes[name] = jax.ShapeDtypeStruct(
            (spec.rows, spec.tokens_per_row, *trailing), field.dtype
        )
    return shapes


def _abstract(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


def compile_programs(
    config: EngineConfig, params: Tree, state: Tree, spec: CompileSpec
) -> Programs:
    """Compile every program of a run for one micro-batch shape."""
    optimizer = make_optimizer(config.optimizer)
    abstract_params, abstract_state = _abstract(params), _abstract(state)
    sums = jax.eval_shape(zero_sums, abstract_params)
    batch = batch_shapes(spec)

    def fwd_bwd(params: Tree, sums: Tree, batch: Tree) -> Tree:
        return _fwd_bwd(config, params, sums, batch)

    def update(state: Tree, sums: Tree) -> Tree:
        return _update(config, optimizer, state, sums)

    def reset(sums: Tree) -> Tree:
        return jax.tree.map(jnp.zeros_like, sums)

    def score(params: Tree, batch: Tree) -> Array:
        return _score(config, params, batch)

    def evaluate(params: Tree, batch: Tree) -> Array:
        return _evaluate(config, params, batch)

    return Programs(
        fwd_bwd=jax.jit(fwd_bwd, donate_argnums=1).lower(abstract_params, sums, batch).compile(),
        update=jax.jit(update, donate_argnums=(0, 1)).lower(abstract_state, sums).compile(),
        reset=jax.jit(reset, donate_argnums=0).lower(sums).compile(),
        score=jax.jit(score).lower(abstract_params, batch).compile(),
        evaluate=jax.jit(evaluate).lower(abstract_params, batch).compile(),
    )
