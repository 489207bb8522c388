"""Logs of both programs: lines for a person, or one JSON object a line for a collector."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Final

from prestage.operation.flags import LOG_FORMAT

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """`time` (UTC, RFC 3339), `level`, `logger`, `message`, `program`, `pid`, `thread`, `exception`."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "program": self._program,
            "pid": record.process,
            "thread": record.threadName,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def start_logs(program: str) -> None:
    """From the flags; before anything is logged."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines(program) if LOG_FORMAT.value == "json" else logging.Formatter(_TEXT)
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
