"""Protocol values to and from their protobuf messages. Total in both directions; raises `ValueError`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from prestage.protocol import BatchRef, Lifecycle, Phase, StepState
from prestage.trainer.v1 import trainer_pb2 as pb

_PHASES: Final = MappingProxyType(
    {
        Phase.CLOSED: pb.PHASE_CLOSED,
        Phase.ACCUMULATING: pb.PHASE_ACCUMULATING,
        Phase.UPDATE_DEFERRED: pb.PHASE_UPDATE_DEFERRED,
        Phase.FAILED: pb.PHASE_FAILED,
    }
)
_LIFECYCLES: Final = MappingProxyType(
    {
        Lifecycle.STARTING: pb.LIFECYCLE_STARTING,
        Lifecycle.COMPILING: pb.LIFECYCLE_COMPILING,
        Lifecycle.SERVING: pb.LIFECYCLE_SERVING,
        Lifecycle.DRAINING: pb.LIFECYCLE_DRAINING,
    }
)


def phase_to_proto(phase: Phase) -> pb.Phase:
    return _PHASES[phase]


def phase_from_proto(value: int) -> Phase:
    for phase, proto in _PHASES.items():
        if proto == value:
            return phase
    raise ValueError(f"phase {value} is not one this client knows: update prestage on this side")


def lifecycle_to_proto(lifecycle: Lifecycle) -> pb.Lifecycle:
    return _LIFECYCLES[lifecycle]


def lifecycle_from_proto(value: int) -> Lifecycle:
    for lifecycle, proto in _LIFECYCLES.items():
        if proto == value:
            return lifecycle
    raise ValueError(f"lifecycle {value} is not one this client knows")


def ref_to_proto(ref: BatchRef) -> pb.BatchRef:
    return pb.BatchRef(step=ref.step, index=ref.index, digest=ref.digest)


def ref_from_proto(message: pb.BatchRef) -> BatchRef:
    return BatchRef(step=message.step, index=message.index, digest=message.digest)


def step_state_into_proto(state: StepState, message: pb.WorkerState) -> None:
    """Fill in the fields of a `WorkerState` that belong to the step protocol."""
    message.phase = phase_to_proto(state.phase)
    message.step = state.step
    message.micro_step = state.micro_step
    message.train_step = state.train_step
    if state.staged is not None:
        message.staged.CopyFrom(ref_to_proto(state.staged))
    message.trained.extend(ref_to_proto(ref) for ref in state.trained)
    message.parameters_suspect = state.parameters_suspect
    message.failure = state.failure


def step_state_from_proto(message: pb.WorkerState) -> StepState:
    return StepState(
        phase=phase_from_proto(message.phase),
        step=message.step,
        micro_step=message.micro_step,
        train_step=message.train_step,
        staged=ref_from_proto(message.staged) if message.HasField("staged") else None,
        trained=tuple(ref_from_proto(ref) for ref in message.trained),
        parameters_suspect=message.parameters_suspect,
        failure=message.failure,
    )
