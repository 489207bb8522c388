"""Flags of a live run: where rollouts come in, where they are kept, and how groups are formed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from absl import flags

from prestage.strict_flags import define_seconds, define_strict_bool
from prestage.wire.channel import check_address
from prestage.wire.security import check_reachable
from prestage.wire.security_flags import TLS_DIR

LISTEN = flags.DEFINE_string(
    "listen",
    "",
    "Take live rollouts at unix:///path or host:port, instead of --rollouts; needs --journal_dir.",
)
JOURNAL_DIR = flags.DEFINE_string(
    "journal_dir", "", "Folder of the journal, on a local disk; the same one to go on with a run."
)
JOURNAL_BUDGET = flags.DEFINE_integer(
    "journal_budget_bytes",
    16 << 30,
    "Rollouts kept on disk, bytes; above it producers wait.",
    lower_bound=1,
)
JOURNAL_PENDING = flags.DEFINE_integer(
    "journal_pending_bytes",
    64 << 20,
    "Rollouts in memory that are not durable yet, bytes; above it producers wait.",
    lower_bound=1,
)
GROUP_TIMEOUT = define_seconds(
    "group_timeout_s", 3600.0, "A group that is not complete after this is dropped, s."
)
EXTRA = flags.DEFINE_integer(
    "extra",
    0,
    "Over-generation: producers make group_size + extra, the first group_size are kept.",
    lower_bound=0,
)
MAX_STALENESS = flags.DEFINE_integer(
    "max_staleness",
    -1,
    "Updates between sampling and use; older groups are dropped whole; -1 = any.",
    lower_bound=-1,
)
MAX_PRODUCERS = flags.DEFINE_integer(
    "max_producers", 64, "Producers that may be connected at a time.", lower_bound=1
)
INSECURE = define_strict_bool(
    "insecure", False, "Use plain text with addresses beyond this host, for rollouts and trainer."
)


@dataclass(frozen=True, kw_only=True)
class LiveFlags:
    """What a live run is told beside what every run is told."""

    listen: str
    journal_dir: Path
    journal_budget_bytes: int
    journal_pending_bytes: int
    group_timeout_s: float
    extra: int
    max_staleness: int | None  # Updates; None: any.
    max_producers: int


def live_from_flags() -> LiveFlags | None:
    """None: the run is not live. Raises `ValueError` naming the flag, its value and the fix."""
    listen, folder = LISTEN.value or "", JOURNAL_DIR.value or ""
    if not listen and not folder:
        return None
    if not listen:
        raise ValueError(
            f"--journal_dir is {folder!r} but --listen is not set: say where rollouts come in, or"
            " leave both out and give --rollouts"
        )
    if not folder:
        raise ValueError(
            f"--listen is {listen!r} but --journal_dir is not set: live rollouts are kept in a"
            " journal, give it a folder on a local disk"
        )
    check_address("--listen", listen)
    check_reachable(
        "--listen", listen, protected=bool(TLS_DIR.value), insecure=bool(INSECURE.value)
    )
    staleness = MAX_STALENESS.value
    return LiveFlags(
        listen=listen,
        journal_dir=Path(folder),
        journal_budget_bytes=JOURNAL_BUDGET.value,
        journal_pending_bytes=JOURNAL_PENDING.value,
        group_timeout_s=GROUP_TIMEOUT.value,
        extra=EXTRA.value,
        max_staleness=None if staleness < 0 else staleness,
        max_producers=MAX_PRODUCERS.value,
    )
