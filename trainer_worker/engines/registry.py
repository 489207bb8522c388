"""Engines by name. Imports an engine only when it is asked for, so that JAX stays out of others."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from absl import flags

from prestage.strict_flags import define_finite_float, define_strict_bool
from trainer_worker.clock import RealClock
from trainer_worker.engine import EngineParts
from trainer_worker.engines.errors import EngineConfigError
from trainer_worker.engines.jax_flags import create_from_flags
from trainer_worker.engines.processes import Processes

ENGINES: Final = ("jax", "maxtext", "timed")


_FACTORY = flags.DEFINE_string(
    "trainer_factory", "", "maxtext: package.module:function that returns a TrainerSetup."
)
_CHECKPOINTS = flags.DEFINE_string("checkpoint_dir", "", "Folder for checkpoints; empty: none.")
_INFLIGHT = flags.DEFINE_integer(
    "max_inflight", 2, "Micro-batches dispatched at a time.", lower_bound=1
)
_TIMED_FWD_BWD = define_finite_float("timed_fwd_bwd_s", 0.05, "timed: one micro-batch, s.")
_TIMED_UPDATE = define_finite_float("timed_update_s", 0.01, "timed: one update, s.")
_TIMED_WAITS = define_strict_bool(
    "timed_update_waits",
    False,
    "timed: the update waits for the last micro-batch, as one with dropless retry does.",
)
_TIMED_COPY = define_finite_float("timed_copy_s", 0.02, "timed: one input copy, s.")
_TIMED_RATE = define_finite_float(
    "timed_copy_bytes_per_s", 0.0, "timed: rate of input copies, on top of timed_copy_s; 0 = none."
)
_TIMED_SAVE = define_finite_float(
    "timed_checkpoint_s", 0.0, "timed: from a snapshot to its durable checkpoint, s."
)
_TIMED_IDLE = define_finite_float(
    "timed_idle_wait_s", 0.0, "timed: what wait_for_device reads on an idle device, s."
)
_TIMED_COMPILE = define_finite_float("timed_compile_s", 0.0, "timed: a compile, s.")
_TIMED_VOCAB = flags.DEFINE_integer("timed_vocab_size", 0, "timed: vocabulary; 0 = any id.")
_TIMED_STAGES = define_strict_bool("timed_can_stage", True, "timed: whether it can stage.")
_TIMED_DEFERS = define_strict_bool("timed_can_defer", True, "timed: whether it can defer.")


def _timed(processes: Processes | None) -> EngineParts:
    from trainer_worker.engines.timed import TimedConfig, create_timed
    from trainer_worker.engines.timed_hosts import create_timed_host

    try:
        config = TimedConfig(
            fwd_bwd_seconds=_TIMED_FWD_BWD.value,
            update_seconds=_TIMED_UPDATE.value,
            update_waits=bool(_TIMED_WAITS.value),
            copy_seconds=_TIMED_COPY.value,
            copy_bytes_per_second=_TIMED_RATE.value,
            checkpoint_seconds=_TIMED_SAVE.value,
            idle_wait_seconds=_TIMED_IDLE.value,
            compile_seconds=_TIMED_COMPILE.value,
            max_inflight=_INFLIGHT.value,
            vocab_size=_TIMED_VOCAB.value,
            can_stage=bool(_TIMED_STAGES.value),
            can_defer_update=bool(_TIMED_DEFERS.value),
        )
    except ValueError as error:
        raise EngineConfigError(f"engine timed: {error}") from error
    folder = Path(_CHECKPOINTS.value) if _CHECKPOINTS.value else None
    if processes is not None:
        return create_timed_host(config, RealClock(), processes, folder)
    return create_timed(config, RealClock(), folder)


def create_engine(name: str, processes: Processes | None = None) -> EngineParts:
    """Build an engine from its flags. Raises `EngineConfigError`.

    `processes`: this process's place among several; its engine then has a `shards` face.
    """
    if name == "timed":
        return _timed(processes)
    if name == "maxtext":
        if processes is not None:
            raise EngineConfigError("engine maxtext cannot be one of several processes here")
        from trainer_worker.engines.maxtext.create import create_maxtext

        return create_maxtext(_FACTORY.value or "")
    return create_from_flags(
        max_inflight=_INFLIGHT.value,
        checkpoint_dir=Path(_CHECKPOINTS.value) if _CHECKPOINTS.value else None,
        processes=processes,
    )
