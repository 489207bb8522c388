"""`orchestrator`: drives a trainer. Its tools are subcommands: `orchestrator bench ...` and others."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

from absl import app

# Subcommand to module and function (`main` when none is named): `(argv) -> int` runs it. Imported only
# when it is asked for.
COMMANDS: Final = {
    "bench": "orchestrator.bench.main",
    "check-trace": "orchestrator.check_trace",
    "conformance": "orchestrator.bench.conformance.main",
    "pause": "orchestrator.operation.cli:pause",
    "render": "orchestrator.recipes.main",
    "resume": "orchestrator.operation.cli:resume",
    "simulate": "orchestrator.bench.simulate",
    "status": "orchestrator.operation.cli:status",
    "stop": "orchestrator.operation.cli:stop",
    "submit": "orchestrator.client.submit",
}


HELP: Final = """orchestrator: trains a run on a worker; its tools are subcommands.

    orchestrator --trainer=unix:///run/worker.sock --rollouts=FILE --num_steps=N
    orchestrator --trainer=unix:///run/worker.sock --listen=unix:///run/rollouts.sock --journal_dir=DIR
    orchestrator status|pause|resume|stop --admin=ADDRESS
    orchestrator bench|check-trace|conformance|render|simulate|submit --help

Ends in order on SIGTERM; the same command goes on where it ended. Exit status: 0 trained to the end or
ended as asked, 1 the run failed, 2 a flag, file or address cannot be used, 70 the watchdog ended it.
See docs/operations.md.
"""
OWN_FLAGS: Final = (
    "orchestrator.flags",
    "orchestrator.ingest.flags",
    "orchestrator.operation.flags",
    "prestage.operation.flags",
    "prestage.wire.security_flags",
)


def _train(argv: Sequence[str]) -> int:
    from orchestrator import app as application
    from orchestrator.bringup import WorkerUnreachable
    from orchestrator.feeder import SourceError
    from orchestrator.flags import config_from_flags
    from orchestrator.ingest.flags import INSECURE
    from orchestrator.live import LiveIntake
    from orchestrator.operation.board import RunBudgets
    from orchestrator.operation.flags import operation_from_flags
    from orchestrator.operation.operation import Operation
    from orchestrator.recorded import recorded_source
    from orchestrator.runner import RunFailed
    from prestage.operation.logs import start_logs
    from prestage.operation.signals import hear_signals
    from prestage.wire.channel import forbid_fork, raise_file_limit, tune_allocator
    from prestage.wire.security import Security
    from prestage.wire.security_flags import security_config

    if len(argv) > 1:
        known = ", ".join(COMMANDS)
        print(f"orchestrator: unknown command {argv[1]!r}; known: {known}", file=sys.stderr)  # noqa: T201
        return 2
    start_logs("orchestrator")
    tune_allocator()
    raise_file_limit()
    forbid_fork()
    try:
        config = config_from_flags(os.environ)
        security = Security(security_config(insecure=bool(INSECURE.value)))
        operation = Operation(
            operation_from_flags(trace_dir=config.trace_dir, result_file=config.result_file),
            budgets=RunBudgets.beyond(
                trainer_wait_s=config.trainer_wait_s, data_wait_s=config.data_wait_s
            ),
            security=security,
        )
        hear_signals(operation.ending.begin)
        with operation:
            try:
                intake = None
                if config.live is not None:
                    intake = LiveIntake(config.live, operation.guard(), operation.metrics.refused)
                    operation.metrics.live.watch(intake.read)
                make_source = recorded_source if intake is None else intake.open
                result = application.run(config, make_source, operation, intake)
            except Exception as error:  # Whatever a run that is being stopped ends with.
                if not operation.stopped(error):
                    raise
                return operation.ending.exit_code
    except (ValueError, WorkerUnreachable, SourceError) as error:
        print(f"orchestrator: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except RunFailed as error:
        print(f"orchestrator: the run failed: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(application.summary_text(result))  # noqa: T201
    return 0


def run() -> None:
    """Console script."""
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        name, _, function = COMMANDS[sys.argv[1]].partition(":")
        module = importlib.import_module(name)
        command = cast(Callable[[Sequence[str]], int], vars(module)[function or "main"])
        sys.exit(command(sys.argv[2:]))
    from orchestrator import flags  # noqa: F401  (defines the flags)
    from orchestrator.operation import flags as operation_flags  # noqa: F401
    from prestage.operation.help import own_help, parse_flags

    own_help(HELP, OWN_FLAGS)
    app.run(lambda argv: sys.exit(_train(argv)), flags_parser=parse_flags)


if __name__ == "__main__":
    run()
