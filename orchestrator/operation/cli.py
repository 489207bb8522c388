"""`orchestrator status|pause|resume|stop --admin=ADDRESS`: asks a running orchestrator."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import grpc
from google.protobuf import json_format

from prestage.admin.v1 import admin_pb2 as pb
from prestage.admin.v1 import admin_pb2_grpc as pb_grpc
from prestage.wire.channel import AddressError, check_address
from prestage.wire.errors import Unknown, classify
from prestage.wire.security import Role, Security, SecurityConfig, SecurityError

_CALL_SECONDS: Final = 10.0
_LOOK_S: Final = 0.2


def _seconds(value: float) -> str:
    if math.isnan(value) or value < 0:
        return "-"
    if math.isinf(value):
        return "no limit"
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.1f} min"
    return f"{value / 3600:.1f} h"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def state_name(status: pb.RunStatus) -> str:
    """`TRAINING` and the like."""
    return pb.RunState.Name(status.state).removeprefix("RUN_STATE_")


def text_of(status: pb.RunStatus) -> str:
    """What a person reads."""
    state = state_name(status)
    lines = [
        f"run {status.run_id}: {state} ({status.doing})",
        f"  progress    {_seconds(status.progress_age_seconds)} ago; this may take"
        f" {_seconds(status.progress_allowance_seconds)}",
        f"  steps       {status.step} of {status.num_steps} closed, {status.train_step} updates;"
        f" open step: {status.micro_step} micro-batches, phase {status.phase or '-'}",
        f"  staged      {status.staged or 'nothing'}"
        + ("; staging turned itself off" if status.staging_latched else ""),
        f"  queue       {status.queue.ready_micro_batches} micro-batches ready;"
        f" {_bytes(status.queue.put_bytes)} brought to the worker,"
        f" {status.queue.put_retries} puts repeated",
        f"  worker      {status.trainer}, incarnation {status.incarnation or '-'}, epoch"
        f" {status.epoch}",
        f"  refusals    {_counts(dict(status.refusals))}",
        f"  notes       {_counts(dict(status.notes))}",
        f"  process     {status.pid}, up {_seconds(status.uptime_seconds)}",
    ]
    if status.queue.HasField("live"):
        live = status.queue.live
        lines.insert(
            5,
            f"  rollouts    {live.waiting_groups} groups wait ({_bytes(live.queue_bytes)} of"
            f" {_bytes(live.queue_budget_bytes)}), {live.incomplete_groups} are incomplete,"
            f" {live.producers} producers; journal {_bytes(live.journal_bytes)} of"
            f" {_bytes(live.journal_budget_bytes)}",
        )
    if status.last_note:
        lines.append(f"  last note   {status.last_note}")
    if status.stop_reason:
        lines.append(f"  stopping    {status.stop_reason}")
    for step in status.steps:
        loss = "-" if math.isnan(step.loss) else f"{step.loss:.4g}"
        lines.append(
            f"  step {step.step:<6} {_seconds(step.seconds):>9}, {step.micro_steps} micro-batches,"
            f" loss {loss}, boundary idle {_seconds(step.boundary_idle_seconds)}"
            + (", staged" if step.staged_input_used else "")
        )
    return "\n".join(lines)


def _parser(command: str) -> argparse.ArgumentParser:
    says = {
        "status": "Shows what a run is at.",
        "pause": "Holds the run at its next step boundary; the open step is finished.",
        "resume": "Takes a pause back.",
        "stop": "Ends the orchestrator as SIGTERM does; the run can be resumed.",
    }
    parser = argparse.ArgumentParser(prog=f"orchestrator {command}", description=says[command])
    parser.add_argument(
        "--admin",
        required=True,
        metavar="ADDRESS",
        help="the orchestrator's --health_listen: unix:///path or host:port",
    )
    parser.add_argument("--tls_dir", metavar="DIR", help="certificates, as the orchestrator's")
    parser.add_argument("--token_dir", metavar="DIR", help="tokens, as the orchestrator's")
    parser.add_argument(
        "--tls_server_name",
        default="",
        metavar="NAME",
        help="the name in the server's certificate",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="plain text to an address on another host"
    )
    parser.add_argument("--json", action="store_true", help="print the status as JSON")
    if command in ("pause", "stop"):
        parser.add_argument(
            "--wait_s",
            type=float,
            default=0.0,
            metavar="SECONDS",
            help="wait until it is paused (or gone); exit status 1 when it is not by then",
        )
    return parser


def _channel(command: str, options: argparse.Namespace) -> grpc.Channel:
    """Raises `AddressError`, `SecurityError`."""
    check_address("--admin", options.admin)
    tls = Path(options.tls_dir) if options.tls_dir else None
    tokens = Path(options.token_dir) if options.token_dir else None
    config = SecurityConfig(
        tls_dir=tls,
        token_dir=tokens,
        server_name=options.tls_server_name,
        insecure=options.insecure,
    )
    looks = command == "status" and tokens is not None and (tokens / Role.READ.value).is_file()
    role = Role.READ if looks else Role.DRIVE
    return Security(config).open_channel("--admin", options.admin, role)


def _ask(command: str, stub: pb_grpc.OrchestratorAdminStub) -> pb.RunStatus:
    if command == "pause":
        return stub.Pause(pb.PauseRequest(), timeout=_CALL_SECONDS).status
    if command == "resume":
        return stub.Resume(pb.ResumeRequest(), timeout=_CALL_SECONDS).status
    if command == "stop":
        return stub.Stop(pb.StopRequest(), timeout=_CALL_SECONDS).status
    return stub.Status(pb.StatusRequest(), timeout=_CALL_SECONDS).status


def _done(command: str, look: Callable[[], pb.RunStatus]) -> pb.RunStatus | None:
    """The status once the command has taken effect; None = not yet. Stop ends in a `RpcError`."""
    status = look()
    return status if command == "pause" and status.state == pb.RUN_STATE_PAUSED else None


def run(command: str, arguments: Sequence[str]) -> int:
    """0 done, 1 not yet or refused, 2 unusable arguments, 3 nobody answers."""
    options = _parser(command).parse_args(list(arguments))
    wait_s = float(options.wait_s) if command in ("pause", "stop") else 0.0
    try:
        channel = _channel(command, options)
    except (AddressError, SecurityError) as error:
        print(f"orchestrator {command}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    with channel:
        stub = pb_grpc.OrchestratorAdminStub(channel)
        try:
            status = _ask(command, stub)
            reached = wait_s <= 0
            give_up_s = time.monotonic() + wait_s
            while not reached and time.monotonic() < give_up_s:
                try:
                    now = _done(command, lambda: _ask("status", stub))
                except grpc.RpcError:
                    if command != "stop":
                        raise
                    reached = True
                    break
                reached = now is not None
                status = now or status
                time.sleep(0 if reached else _LOOK_S)
        except grpc.RpcError as error:
            outcome = classify(error)
            print(f"orchestrator {command}: {outcome}", file=sys.stderr)  # noqa: T201
            if isinstance(outcome, Unknown):
                print(  # noqa: T201
                    f"nobody answers at {options.admin}: is the orchestrator running, with"
                    " --health_listen at this address?",
                    file=sys.stderr,
                )
                return 3
            return 1
    if options.json:
        plain = json_format.MessageToDict(
            status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        print(json.dumps(plain, indent=1, sort_keys=True))  # noqa: T201
    else:
        print(text_of(status))  # noqa: T201
    return 0 if reached else 1


def status(argv: Sequence[str]) -> int:
    """`orchestrator status`."""
    return run("status", argv)


def pause(argv: Sequence[str]) -> int:
    """`orchestrator pause`."""
    return run("pause", argv)


def resume(argv: Sequence[str]) -> int:
    """`orchestrator resume`."""
    return run("resume", argv)


def stop(argv: Sequence[str]) -> int:
    """`orchestrator stop`."""
    return run("stop", argv)
