"""The security page's table is the code's, and its commands work as they stand."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from prestage.wire.security import ALLOWED, Role, Security, SecurityConfig
from prestage.wire.tls_files import load_identity

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def table(allowed: Mapping[str, frozenset[Role]] = ALLOWED) -> str:
    """Methods of a service that have the same roles stand in one row."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, roles in allowed.items():
        service, method = name.removeprefix("/").split("/")
        key = service, tuple(sorted(role.value for role in roles))
        rows.setdefault(key, []).append(method)
    head = "| service | calls | roles |\n| --- | --- | --- |\n"
    return head + "\n".join(
        f"| `{service}` | {', '.join(f'`{method}`' for method in methods)} |"
        f" {', '.join(f'`{role}`' for role in roles)} |"
        for (service, roles), methods in rows.items()
    )


def test_the_table_of_roles_is_the_codes() -> None:
    found = re.search(r"<!-- roles: .*? -->\n(.*?)\n<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found.group(1) == table(), "write tests.security.test_docs.table() into the page"


def test_the_commands_make_files_that_both_programs_take(tmp_path: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        command = ["sh", "-euc", block]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    for host in ("worker", "orchestrator"):
        assert load_identity(tmp_path / host).names == (host, "localhost", "127.0.0.1")
        config = SecurityConfig(tls_dir=tmp_path / host, token_dir=tmp_path / "tokens")
        tokens = Security(config).tokens
        assert tokens is not None and tokens.roles() == frozenset(Role)
