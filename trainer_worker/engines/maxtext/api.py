"""What a trainer of MaxText's or Tunix's shape offers, and what its factory says about it.

Nothing is guessed from the trainer: what it can do beyond `Trainer` is said in its `TrainerSetup`,
and checked once, by name, when the worker starts. Imports neither JAX, MaxText nor Tunix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from prestage.microbatch import MicroBatch

Payload = object
"""What the trainer's `fwd_bwd` takes: Tunix's `RLTrainerPayload`, or whatever `to_payload` makes."""


class WeightedMetric(Protocol):
    """A sum and what to divide it by, on the device; scalars, or one entry a micro-batch."""

    @property
    def unreduced_sum(self) -> object: ...

    @property
    def denominator(self) -> object: ...


class MetricsBuffer(Protocol):
    """The metrics of one step, on the device."""

    @property
    def weighted_metrics(self) -> Mapping[str, WeightedMetric]: ...

    @property
    def scalar_metrics(self) -> Mapping[str, object]: ...


@runtime_checkable
class Trainer(Protocol):
    """The part of MaxText's `AbstractTrainingEngine` (read at 0.2.5) that a step needs."""

    @property
    def train_step(self) -> int: ...

    def compile(self, dummy_data: Payload) -> None: ...

    def fwd_bwd(self, payload: Payload) -> None:
        """Accumulates the gradient of the unreduced sum. Dispatches; never updates by itself."""
        ...

    def update(self) -> int: ...

    def get_metrics(self, clear_cache: bool = True) -> MetricsBuffer: ...

    def close(self) -> None: ...


@runtime_checkable
class StagingTrainer(Protocol):
    """What staging needs beyond `Trainer`: an input can be copied ahead of its `fwd_bwd`."""

    def prepare_fwd_bwd_input(self, payload: Payload) -> Payload: ...

    def wait_for_device(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class CheckpointHooks:
    """How the trainer's own checkpoints are made durable and found again.

    `save(step, metadata)` may return before the checkpoint is durable; `wait()` returns once every
    save is (Orbax: `wait_until_finished`) and raises what went wrong. `restore(step)` loads one
    (None: the newest) and returns its metadata, or None where there is none. `durable_step()` is the
    step of the newest complete one, or None.
    """

    save: Callable[[int, Mapping[str, object]], None]
    wait: Callable[[], None]
    restore: Callable[[int | None], Mapping[str, object] | None]
    durable_step: Callable[[], int | None]


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    """What a factory returns: a trainer, ready but for `compile`, and what it can do."""

    trainer: Trainer
    to_payload: Callable[[MicroBatch], Payload]
    can_stage: bool  # It is a `StagingTrainer` whose copy overlaps compute.
    drop_gradients: Callable[[], None] | None = None  # Forgets what fwd_bwd accumulated.
    parameters: Callable[[], Mapping[str, npt.NDArray[np.generic]]] | None = None  # For the digest.
    checkpoints: CheckpointHooks | None = None
    update_waits_for_device: bool = False  # Dropless retry: update() needs the last micro-batch.
    optional_fields: tuple[str, ...] = (
        "sampling_logprobs",
        "old_logprobs",
        "ref_logprobs",
        "routed_experts",
    )
    required_fields: tuple[str, ...] = ()
    vocab_size: int = 0  # 0: any token id is passed on.
    moe_layers: int = 0
    top_k: int = 0
    num_experts: int = 0
    row_multiple: int = 1
    metric_names: Mapping[str, str] = field(
        default_factory=lambda: {"gradient_norm": "grad_norm"}
    )  # The trainer's name to ours.


TrainerFactory = Callable[[Sequence[str]], TrainerSetup]
"""Takes the MaxText settings of the recipe, each `name=value`."""
