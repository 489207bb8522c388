"""A small trainer with MaxText's surface: linear in an embedding, plain gradient descent."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from trainer_worker.engines.maxtext.api import CheckpointHooks, TrainerSetup
from trainer_worker.engines.maxtext.payload import RLPayload, rl_payload

VOCAB, WIDTH = 128, 8


def _sums(params, ids, mask, advantages):
    hidden = params["table"][ids] @ params["mix"]
    return jnp.sum(jnp.tanh(hidden).sum(-1) * advantages * mask)


_grad = jax.jit(jax.value_and_grad(_sums))


@jax.jit
def _apply(params, grads, denominator):
    new = jax.tree.map(lambda p, g: p - 0.1 * g / denominator, params, grads)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return new, norm / denominator


@dataclass
class Weighted:
    unreduced_sum: object
    denominator: object


@dataclass
class Buffer:
    weighted_metrics: dict[str, Weighted] = field(default_factory=dict)
    scalar_metrics: dict[str, object] = field(default_factory=dict)


class PlainTrainer:
    """Trains, and cannot stage."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0))
        self.params = {
            "table": jax.random.normal(keys[0], (VOCAB, WIDTH)),
            "mix": jax.random.normal(keys[1], (WIDTH, WIDTH)),
        }
        self._step = 0
        self._grads = None
        self._denominator = jnp.float32(0)
        self._buffer = Buffer()
        self._losses: list[object] = []
        self._inflight: deque[object] = deque()
        self.compiled: RLPayload | None = None
        self.calls: list[str] = []
        self.closed = False

    @property
    def train_step(self) -> int:
        return self._step

    def compile(self, dummy_data: RLPayload) -> None:
        self.compiled = dummy_data

    def fwd_bwd(self, payload: RLPayload) -> None:
        self.calls.append("fwd_bwd")
        while len(self._inflight) >= 2:
            jax.block_until_ready(self._inflight.popleft())
        mask = jnp.asarray(payload.completion_mask)
        loss, grads = _grad(self.params, payload.completion_ids, mask, payload.advantages)
        self._inflight.append(loss)
        self._losses.append(loss)
        self._denominator += mask.sum()
        if self._grads is None:
            self._grads = grads
        else:
            self._grads = jax.tree.map(jnp.add, self._grads, grads)

    def update(self) -> int:
        self.calls.append("update")
        self.params, norm = _apply(self.params, self._grads, self._denominator)
        self._buffer = Buffer(
            {"loss": Weighted(jnp.stack(self._losses), self._denominator)},
            {"gradient_norm": norm},
        )
        self._step += 1
        self.drop()
        return self._step

    def drop(self) -> None:
        self._grads, self._denominator, self._losses = None, jnp.float32(0), []

    def get_metrics(self, clear_cache: bool = True) -> Buffer:
        buffer = self._buffer
        if clear_cache:
            self._buffer = Buffer()
        return buffer

    def named(self) -> Mapping[str, np.ndarray]:
        return {name: np.asarray(leaf) for name, leaf in self.params.items()}

    def close(self) -> None:
        self.closed = True


class StagedTrainer(PlainTrainer):
    """Copies an input ahead."""

    def prepare_fwd_bwd_input(self, payload: RLPayload) -> RLPayload:
        self.calls.append("prepare")
        import dataclasses

        return dataclasses.replace(
            payload,
            completion_ids=jax.device_put(np.array(payload.completion_ids)),
            advantages=jax.device_put(np.array(payload.advantages)),
            completion_mask=jax.device_put(np.array(payload.completion_mask)),
        )

    def wait_for_device(self) -> float:
        while self._inflight:
            jax.block_until_ready(self._inflight.popleft())
        return 0.0


class FusedTrainer(StagedTrainer):
    """Updates inside every fwd_bwd."""

    def fwd_bwd(self, payload: RLPayload) -> None:
        super().fwd_bwd(payload)
        self.update()


class Saved:
    """Checkpoint hooks over memory."""

    def __init__(self, trainer: PlainTrainer) -> None:
        self._trainer = trainer
        self.kept: dict[int, tuple[dict[str, object], int, Mapping[str, object]]] = {}

    def hooks(self) -> CheckpointHooks:
        return CheckpointHooks(
            save=self._save, wait=lambda: None, restore=self._restore, durable_step=self._durable
        )

    def _save(self, step: int, metadata: Mapping[str, object]) -> None:
        self.kept[step] = (dict(self._trainer.params), self._trainer.train_step, dict(metadata))

    def _restore(self, step: int | None) -> Mapping[str, object] | None:
        if not self.kept:
            return None
        params, train_step, metadata = self.kept[max(self.kept) if step is None else step]
        self._trainer.params, self._trainer._step = dict(params), train_step
        return metadata

    def _durable(self) -> int | None:
        return max(self.kept, default=None)


def setup_of(trainer: PlainTrainer, **changes: object) -> TrainerSetup:
    values: dict[str, object] = {
        "trainer": trainer,
        "to_payload": rl_payload,
        "can_stage": isinstance(trainer, StagedTrainer),
        "drop_gradients": trainer.drop,
        "parameters": trainer.named,
        "vocab_size": VOCAB,
    }
    return TrainerSetup(**{**values, **changes})  # type: ignore[arg-type]


SEEN: list[Sequence[str]] = []


def factory(settings: Sequence[str]) -> TrainerSetup:
    """What `--trainer_factory` names."""
    SEEN.append(settings)
    return setup_of(StagedTrainer())


def claims_to_stage(settings: Sequence[str]) -> TrainerSetup:
    del settings
    return setup_of(PlainTrainer(), can_stage=True)


def returns_nothing(settings: Sequence[str]) -> None:
    del settings


def lacks_methods(settings: Sequence[str]) -> TrainerSetup:
    del settings
    return TrainerSetup(trainer=object(), to_payload=rl_payload, can_stage=False)  # type: ignore[arg-type]
