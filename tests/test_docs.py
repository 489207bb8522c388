"""Generated docs are what the code says now."""

from __future__ import annotations

import pytest

from tests.generate_docs import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), (
        f"docs/{name} is stale: run `python -m tests.generate_docs`"
    )
