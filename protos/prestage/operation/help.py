"""`--help` that shows a program's own flags, however the program was started."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from absl import flags


def parse_flags(argv: list[str]) -> list[str]:
    """For `absl.app.run`: a flag that cannot be used ends with 2 and one line; help with 0."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"{Path(argv[0]).name}: {error}; see --help", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except SystemExit as ended:
        # Help was asked for and shown; absl calls that 1.
        sys.exit(0 if ended.code == 1 else ended.code)


def own_help(summary: str, modules: Iterable[str]) -> None:
    """Make `--help` print `summary` and the flags that these modules define. Before flags are parsed."""
    defined = flags.FLAGS.flags_by_module_dict()
    for module in modules:
        for flag in defined.get(module, []):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    sys.modules["__main__"].__doc__ = summary.replace("%", "%%")
