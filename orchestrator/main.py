"""`orchestrator`: drives a trainer. Its tools are subcommands: `orchestrator bench ...` and others."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

from absl import app

# Subcommand to module; its `main(argv) -> int` runs it. Imported only when it is asked for.
COMMANDS: Final = {
    "bench": "orchestrator.bench.main",
    "check-trace": "orchestrator.check_trace",
    "conformance": "orchestrator.bench.conformance.main",
    "render": "orchestrator.recipes.main",
    "simulate": "orchestrator.bench.simulate",
}


def _train(argv: Sequence[str]) -> int:
    from orchestrator import app as application
    from orchestrator.bringup import WorkerUnreachable
    from orchestrator.feeder import SourceError
    from orchestrator.flags import config_from_flags
    from orchestrator.recorded import recorded_source
    from orchestrator.runner import RunFailed
    from prestage.wire.channel import forbid_fork, tune_allocator

    if len(argv) > 1:
        known = ", ".join(COMMANDS)
        print(f"orchestrator: unknown command {argv[1]!r}; known: {known}", file=sys.stderr)  # noqa: T201
        return 2
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    tune_allocator()
    forbid_fork()
    try:
        config = config_from_flags(os.environ)
        result = application.run(config, recorded_source)
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
        module = importlib.import_module(COMMANDS[sys.argv[1]])
        command = cast(Callable[[Sequence[str]], int], module.main)
        sys.exit(command(sys.argv[2:]))
    from orchestrator import flags  # noqa: F401  (defines the flags)

    app.run(lambda argv: sys.exit(_train(argv)))


if __name__ == "__main__":
    run()
