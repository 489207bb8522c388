"""Generates the docs that are drawn from code. `python -m tests.generate_docs` rewrites them.

`tests/test_docs.py` holds them to the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from prestage.protocol import SEQUENCED_CALLS, TABLE, Call, Phase, Reason

DOCS = Path(__file__).parent.parent / "docs"
_CODES: Mapping[Reason, str] = {
    Reason.SEQUENCE_GAP: "OUT_OF_RANGE",
    Reason.KEY_REUSED: "ALREADY_EXISTS",
    Reason.MICRO_BATCH_MISSING: "NOT_FOUND",
    Reason.CHECKPOINT_MISSING: "NOT_FOUND",
    Reason.DIGEST_MISMATCH: "DATA_LOSS",
    Reason.INVALID_BATCH: "INVALID_ARGUMENT",
    Reason.INVALID_REQUEST: "INVALID_ARGUMENT",
    Reason.ENGINE_FAILED: "ABORTED",
}


def _cell(call: Call, phase: Phase) -> str:
    cell = TABLE[call][phase]
    if isinstance(cell, Reason):
        return f"refused: `{cell.value}`"
    return "yes" if cell is phase else f"-> {cell.value}"


def _table() -> str:
    head = "| call | " + " | ".join(phase.value for phase in Phase) + " | sequenced |\n"
    head += "| --- |" + " --- |" * (len(Phase) + 1) + "\n"
    rows = [
        f"| `{call.value}` | "
        + " | ".join(_cell(call, phase) for phase in Phase)
        + f" | {'yes' if call in SEQUENCED_CALLS else 'no'} |"
        for call in Call
    ]
    return head + "\n".join(rows)


def _diagram() -> str:
    edges: dict[tuple[Phase, Phase], list[str]] = {}
    for call in Call:
        for phase in Phase:
            cell = TABLE[call][phase]
            if isinstance(cell, Phase) and cell is not phase:
                edges.setdefault((phase, cell), []).append(call.value)
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> CLOSED"]
    for (before, after), calls in edges.items():
        lines.append(f"    {before.value} --> {after.value}: {'<br/>'.join(calls)}")
    lines += [
        f"    {phase.value} --> FAILED: the engine raised"
        for phase in Phase
        if phase is not Phase.FAILED
    ]
    lines.append("```")
    return "\n".join(lines)


def _reasons() -> str:
    rows = [
        f"| `{reason.value}` | `{_CODES.get(reason, 'FAILED_PRECONDITION')}` |" for reason in Reason
    ]
    return "| reason | gRPC status |\n| --- | --- |\n" + "\n".join(rows)


def protocol_page() -> str:
    return f"""# The step protocol

Generated from `prestage/protocol.py` by `python -m tests.generate_docs`; a test holds it to the code.

The worker refuses by this table and the orchestrator plans by it. A refusal changes nothing, and
says the reason, the phase and the calls that are allowed now (`google.rpc.ErrorInfo`, domain
`prestage`). "Sequenced" calls carry `(run_id, incarnation, epoch, seq)` and are carried out once:
the same key again returns the first result.

{_diagram()}

{_table()}

What a phase cannot say:

- a `fwd_bwd` names micro-batch (`step`, `micro_step`); a stage names (`step` + 1, 0) while the update
  is deferred and (`step`, 0) when the step is closed;
- with something staged, the next `fwd_bwd` must be exactly that micro-batch, by digest;
- after a failure inside an update or a restore the parameters are suspect, and only
  `restore_checkpoint` or a restart leaves FAILED.

## Reasons

{_reasons()}
"""


PAGES: Mapping[str, Callable[[], str]] = {"protocol.md": protocol_page}


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(DOCS / name)


if __name__ == "__main__":
    main()
