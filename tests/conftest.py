"""Shared pytest options."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        default="",
        metavar="REASON",
        help="rewrite the frozen call sequences (except tests/golden/stock) and say why",
    )
