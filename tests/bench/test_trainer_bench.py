"""The trainer bench's exact checks: right drivers pass, and every broken one fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.bench.trainer import arm_plan, check_arm
from prestage.trace import TraceRecord

STEPS = 2


def calls(*names: tuple[str, int, int, bool]) -> list[TraceRecord]:
    out = [TraceRecord(side="orchestrator", call="open_run", run_id="r", epoch=1, incarnation="w")]
    for seq, (call, step, index, used) in enumerate(names, start=1):
        out.append(
            replace(
                out[0],
                call=call,
                seq=seq,
                step=step,
                index=index,
                digest=f"d{step}.{index}" if index >= 0 else "",
                used_staged_input=used,
            )
        )
    return out


F, A = "fwd_bwd", "fwd_bwd apply_optimizer"
D, S, U = "fwd_bwd apply_optimizer defer_update", "stage_fwd_bwd", "apply_deferred_update"
END = ((F, 1, 0, True), (A, 1, 1, False))
STOCK = calls((F, 0, 0, False), (A, 0, 1, False), (F, 1, 0, False), (A, 1, 1, False))
STAGED = calls((F, 0, 0, False), (D, 0, 1, False), (S, 1, 0, False), (U, 0, -1, False), *END)
BROKEN = {
    "stages final": [*STAGED, *calls(*[(F, 0, 0, False)] * 6, (S, 2, 0, False))[7:]],
    "trains staged and plain": calls(
        (F, 0, 0, False), (D, 0, 1, False), (S, 1, 0, False), (U, 0, -1, False),
        (F, 1, 0, True), (F, 1, 0, False), (A, 1, 1, False),
    ),
    "stages after update": calls((F, 0, 0, False), (A, 0, 1, False), (S, 1, 0, False), *END),
    "prepared input unused": calls(
        (F, 0, 0, False), (D, 0, 1, False), (S, 1, 0, False), (U, 0, -1, False),
        (F, 1, 0, False), (A, 1, 1, False),
    ),
    "never stages": STOCK,
}  # fmt: skip


def test_off_equals_stock_and_on_holds() -> None:
    assert check_arm(STOCK, arm_plan("stock", STEPS), 2, STOCK) == []
    assert check_arm(STAGED, arm_plan("staged_before", STEPS), 2, STOCK) == []


@pytest.mark.parametrize("name", BROKEN)
def test_broken_driver_fails(name: str) -> None:
    assert check_arm(BROKEN[name], arm_plan("staged_before", STEPS), 2, STOCK)
