"""Flags of the orchestrator's own operation; those of both programs are `prestage.operation.flags`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from absl import flags

from prestage.operation.addresses import split_host_port
from prestage.operation.flags import ProcessConfig, process_config
from prestage.wire.channel import AddressError, check_address, is_local

HEALTH_LISTEN = flags.DEFINE_string(
    "health_listen",
    "",
    "Admin port: health, status, pause, resume, stop; unix:///path or host:port; empty: none.",
)
STATUS_LISTEN = flags.DEFINE_string(
    "status_listen", "", "host:port of the status page, loopback only; empty: none."
)


@dataclass(frozen=True, kw_only=True)
class OperationConfig:
    """How the orchestrator is watched, administered and ended."""

    process: ProcessConfig = field(default_factory=ProcessConfig)
    health_listen: str = ""  # Empty = no admin port.
    status: tuple[str, int] | None = None  # Host and port; None = no status page.
    trace_dir: Path | None = None
    result_file: Path | None = None


def operation_from_flags(*, trace_dir: Path | None, result_file: Path | None) -> OperationConfig:
    """From the flags. Raises `AddressError` naming the flag."""
    admin, status = HEALTH_LISTEN.value or "", STATUS_LISTEN.value or ""
    if admin:
        check_address("--health_listen", admin)
    if status and not is_local(status):
        raise AddressError(
            f"--status_listen is {status!r}, which other hosts can reach: use a loopback address,"
            " and a tunnel to look at it from elsewhere"
        )
    return OperationConfig(
        process=process_config(),
        health_listen=admin,
        status=split_host_port("--status_listen", status) if status else None,
        trace_dir=trace_dir,
        result_file=result_file,
    )
