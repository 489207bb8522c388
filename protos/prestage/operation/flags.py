"""Flags that both programs have to be operated: probes, metrics, how they end. Parsed into one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from absl import flags

from prestage.operation.addresses import split_host_port
from prestage.strict_flags import define_seconds
from prestage.wire.channel import AddressError

LOOPBACK: Final = "127.0.0.1"

PROBE_LISTEN = flags.DEFINE_string(
    "probe_listen",
    "",
    "host:port of /livez, /readyz and /startupz, served by a small process of its own; empty: none.",
)
METRICS_ADDRESS = flags.DEFINE_string(
    "metrics_address",
    "",
    "Prometheus metrics: host:port, or a host whose port is --metrics_port; empty: loopback.",
)
METRICS_PORT = flags.DEFINE_integer(
    "metrics_port",
    0,
    "Prometheus metrics on this port of --metrics_address; 0 = off.",
    lower_bound=0,
    upper_bound=65535,
)
GRACE = define_seconds(
    "grace_s", 30.0, "After SIGTERM: seconds to finish the running call and to end."
)
INTERRUPTED = flags.DEFINE_integer(
    "interrupted_exit_code",
    0,
    "Exit status after SIGTERM, everything resumable.",
    lower_bound=0,
    upper_bound=125,
)

LOG_FORMAT = flags.DEFINE_enum(
    "log_format", "text", ("text", "json"), "Log lines on standard error: text, or JSON objects."
)


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """How a process is watched and ended."""

    probe_listen: str = ""  # host:port; empty = no probes.
    metrics: tuple[str, int] | None = None  # Host and port; None = no metrics.
    metrics_flag: str = "--metrics_port"  # What to name when the address is taken.
    grace_s: float = 30.0
    interrupted_exit_code: int = 0


def metrics_place(address: str, port: int) -> tuple[str, int] | None:
    """Where metrics are served; None = nowhere. Raises `AddressError` when the two flags disagree."""
    if not address:
        return (LOOPBACK, port) if port else None
    host, colon, _ = address.rpartition(":")
    bare = not colon or (
        host.count(":") and not host.startswith("[")
    )  # A bare IPv6 has colons too.
    if bare:
        if not port:
            raise AddressError(
                f"--metrics_address is {address!r}, without a port: write host:port, or give"
                " --metrics_port"
            )
        return address.strip("[]"), port
    place = split_host_port("--metrics_address", address)
    if port and port != place[1]:
        raise AddressError(
            f"--metrics_address={address} and --metrics_port={port} name two ports: give one of them"
        )
    return place


def process_config() -> ProcessConfig:
    """From the flags. Raises `AddressError`."""
    probe = PROBE_LISTEN.value or ""
    if probe:
        split_host_port("--probe_listen", probe)
    return ProcessConfig(
        probe_listen=probe,
        metrics=metrics_place(METRICS_ADDRESS.value or "", METRICS_PORT.value),
        metrics_flag="--metrics_address" if METRICS_ADDRESS.value else "--metrics_port",
        grace_s=GRACE.value,
        interrupted_exit_code=INTERRUPTED.value,
    )
