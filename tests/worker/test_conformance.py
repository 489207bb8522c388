"""The conformance suite passes on the shipped engines, and names the rule that a wrong server breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from orchestrator.bench.conformance.main import run_suite
from prestage import protocol
from prestage.protocol import Call, Phase
from tests.support.rig import FAST, address_of, served
from trainer_worker import sessions
from trainer_worker.clock import RealClock
from trainer_worker.engines.timed import create_timed
from trainer_worker.worker import Worker

Patch = Callable[[pytest.MonkeyPatch], None]


def broken_rules(folder: Path) -> dict[str, str]:
    with served(create_timed(FAST, RealClock(), folder / "checkpoints")) as server:
        outcomes = run_suite(address_of(server))
    assert len(outcomes) >= 15
    assert not [outcome for outcome in outcomes if outcome.verdict == "n/a"]
    return {o.rule: o.why for o in outcomes if o.verdict == "BROKEN"}


def test_the_timed_engine_conforms(tmp_path: Path) -> None:
    assert broken_rules(tmp_path) == {}


@pytest.mark.slow
def test_the_jax_engine_conforms() -> None:
    from trainer_worker.engines.jax_engine.config import EngineConfig, ModelConfig
    from trainer_worker.engines.jax_engine.model import init_params
    from trainer_worker.engines.jax_engine.presets import engine_parts

    model = ModelConfig(
        vocab_size=128,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=32,
    )
    parts = engine_parts(EngineConfig(model=model, logprob_chunk=8), init_params(model, 0))
    with served(parts) as server:
        outcomes = run_suite(address_of(server))
    assert [outcome for outcome in outcomes if outcome.verdict == "BROKEN"] == []
    assert sum(outcome.verdict == "ok" for outcome in outcomes) >= 14


def _no_dedupe(monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(state, key, request):  # type: ignore[no-untyped-def]
        return protocol.check(state.step, request) or sessions.Execute()

    monkeypatch.setattr(sessions, "admit", admit)


def _no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "fence", lambda state, **named: None)


def _refusal_takes_a_seq(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Worker.call

    def call(self, key, request, work):  # type: ignore[no-untyped-def]
        outcome = original(self, key, request, work)
        if isinstance(outcome, protocol.Refusal):
            self._become(dataclasses.replace(self._session, last_seq=self._session.last_seq + 1))
        return outcome

    monkeypatch.setattr(Worker, "call", call)


def _lax_table(call: Call, phase: Phase, cell: protocol.Cell) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        row = {**protocol.TABLE[call], phase: cell}
        monkeypatch.setattr(
            protocol, "TABLE", MappingProxyType({**protocol.TABLE, call: MappingProxyType(row)})
        )

    return patch


WRONG: dict[str, tuple[Patch, str]] = {
    "no dedupe": (_no_dedupe, "the same key returns the first result"),
    "no fence": (_no_fence, "open run fences off older epochs"),
    "refusal takes a seq": (_refusal_takes_a_seq, "a refusal consumes no seq"),
    "metrics while deferred": (
        _lax_table(Call.GET_METRICS, Phase.UPDATE_DEFERRED, Phase.UPDATE_DEFERRED),
        "every call in every phase",
    ),
    "checkpoint while a step is open": (
        _lax_table(Call.SAVE_CHECKPOINT, Phase.ACCUMULATING, Phase.ACCUMULATING),
        "every call in every phase",
    ),
    "empty update": (
        _lax_table(Call.UPDATE, Phase.CLOSED, Phase.CLOSED),
        "every call in every phase",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_server_is_named(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, rule = WRONG[wrong]
    # The suite reads the true table; only the server's is wrong.
    from orchestrator.bench.conformance import rules

    true_table = protocol.TABLE
    patch(monkeypatch)
    monkeypatch.setattr(rules, "TABLE", true_table)
    broken = broken_rules(tmp_path)
    assert any(name.startswith(rule) for name in broken), broken
