"""Counts what the backend compiles, so that "no step compiles" can be proved."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _count
    del duration_secs, kwargs
    if event == _EVENT:
        _count += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


def compile_count() -> int:
    """Programs that the backend compiled in this process since the import."""
    return _count
