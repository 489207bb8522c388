"""`--help` that shows a program's own flags, however the program was started."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from absl import flags


def own_help(summary: str, modules: Iterable[str]) -> None:
    """Make `--help` print `summary` and the flags that these modules define. Before flags are parsed."""
    defined = flags.FLAGS.flags_by_module_dict()
    for module in modules:
        for flag in defined.get(module, []):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    sys.modules["__main__"].__doc__ = summary.replace("%", "%%")
