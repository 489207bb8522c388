"""Bring-up: reach the worker and check what it can do, before anything compiles."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import grpc

from orchestrator.flags import ConfigError, Staging
from orchestrator.plan import RunPlan
from orchestrator.trainer_client import RunShape, TrainerClient
from prestage.protocol import Reason
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.wire.errors import Refusal, Unknown, classify
from prestage.wire.layout import buffer_bytes_of

log = logging.getLogger("prestage.orchestrator")


_NOT_LET_IN: Final = frozenset({Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED})


class WorkerUnreachable(Exception):
    """No worker answered within the wait."""


def reach(
    client: TrainerClient,
    address: str,
    wait_s: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> pb.GetCapabilitiesResponse:
    """Wait until the worker answers. Raises `WorkerUnreachable`, `ConfigError` (a wrong token)."""
    started_s = now()
    said = False
    while True:
        try:
            return client.capabilities()
        except grpc.RpcError as error:
            outcome = classify(error)
            if isinstance(outcome, Refusal) and outcome.reason in _NOT_LET_IN:
                raise ConfigError(
                    f"the worker at {address} does not let this orchestrator in"
                    f" ({outcome.reason.value}): {outcome.message}; give --token_dir with the"
                    " worker's token of the role drive"
                ) from error
            waited_s = now() - started_s
            if waited_s >= wait_s:
                code = outcome.code.name
                raise WorkerUnreachable(
                    f"no worker answered at {address} within {wait_s:g} s ({code}:"
                    f" {outcome.message}): start `trainer_worker --listen={address}`, or correct"
                    " --trainer (and give --tls_dir if it serves TLS); --trainer_wait_s sets the wait"
                ) from error
            if not said:
                said = True
                kind = "starting"
                if isinstance(outcome, Unknown):
                    kind = f"not there yet: {outcome}"
                log.info("waiting for the worker at %s (%s)", address, kind)
            sleep(min(0.5, wait_s))


def missing_for_staging(able: pb.GetCapabilitiesResponse, *, before_update: bool) -> list[str]:
    """What a staged boundary needs and this worker lacks, by name."""
    missing = []
    if not able.can_stage:
        missing.append("stage_fwd_bwd (prepare_fwd_bwd_input, wait_for_device)")
    if before_update and not able.can_defer_update:
        missing.append("defer_update (an update apart from the last fwd_bwd)")
    return missing


def resolve_staging(
    staging: Staging, able: pb.GetCapabilitiesResponse, *, before_update: bool
) -> bool:
    """Whether the run stages. Raises `ConfigError` when it must and the worker cannot."""
    if staging is Staging.OFF:
        return False
    missing = missing_for_staging(able, before_update=before_update)
    if not missing:
        return True
    lacks = " and ".join(missing)
    if staging is Staging.ON:
        raise ConfigError(
            f"--stage_next_microbatch is set, but the worker's engine {able.engine!r} lacks {lacks}:"
            " use an engine that has it, --stage_next_microbatch=auto to run unstaged, or"
            " --nostage_next_microbatch"
        )
    log.warning(
        "[pipeline] the trainer cannot stage: engine %r lacks %s; the boundary runs pipelined and"
        " unstaged",
        able.engine,
        lacks,
    )
    return False


def check_duties(plan: RunPlan, able: pb.GetCapabilitiesResponse) -> None:
    """Raises `ConfigError` when a step would owe a call that the worker's engine lacks."""
    for name, every, can, fix in (
        (
            "checkpoint_every",
            plan.checkpoint_every,
            able.can_checkpoint,
            "give the worker --checkpoint_dir",
        ),
        (
            "weight_sync_every",
            plan.weight_sync_every,
            able.can_export_weights,
            "use an engine that exports weights",
        ),
    ):
        if every and not can:
            raise ConfigError(
                f"--{name} is {every}, but the worker (engine {able.engine!r}) cannot do that:"
                f" {fix}, or --{name}=0"
            )


def check_shape(able: pb.GetCapabilitiesResponse, shape: RunShape) -> None:
    """Raises `ConfigError` when the worker cannot train this shape or these fields."""
    multiple = able.row_multiple or 1
    if shape.rows % multiple:
        raise ConfigError(
            f"--rows is {shape.rows}; the worker's engine shards rows over {multiple} devices: use a"
            f" multiple of {multiple}"
        )
    lacking = sorted(set(able.required_fields) - set(shape.fields))
    if lacking:
        raise ConfigError(
            f"the worker's engine insists on the field(s) {', '.join(lacking)}, which the rollouts"
            " do not have"
        )
    trailing = {"routed_experts": shape.routing_shape}
    fields = {name: trailing.get(name, ()) for name in shape.fields}
    size = buffer_bytes_of(shape.rows, shape.tokens_per_row, fields)
    if able.store_limit_bytes and size > able.store_limit_bytes:
        raise ConfigError(
            f"--rows={shape.rows} --tokens_per_row={shape.tokens_per_row} make micro-batches of"
            f" {size} bytes, but the worker keeps at most {able.store_limit_bytes}: use fewer rows,"
            " or raise the worker's --store_memory_bytes"
        )
