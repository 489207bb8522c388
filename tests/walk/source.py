"""The data source of the walk: what each micro-batch holds, fixed by the journal."""

from __future__ import annotations

from orchestrator.calls import Ready


def digest(step: int, index: int, epoch: int) -> str:
    """The content of a micro-batch. The journal fixes it, so the epoch that packs it is no part."""
    del epoch
    return f"d{step}.{index}"


def ready(step: int, index: int, size: int, *, epoch: int) -> Ready:
    return Ready(step=step, index=index, digest=digest(step, index, epoch), last=index == size - 1)


def expected_chain(num_steps: int, size: int) -> tuple[tuple[tuple[int, int, str], ...], ...]:
    """The parameters of an undisturbed run: each step's micro-batches once, one update a step."""
    return tuple(
        tuple((step, index, f"d{step}.{index}") for index in range(size))
        for step in range(num_steps)
    )
