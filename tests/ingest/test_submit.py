"""`orchestrator submit` against the served ingest."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.client.submit import main
from orchestrator.sources.parquet import RecordedRollouts
from orchestrator.trajectory import TrajectoryLimits
from tests.ingest.fake_log import FakeLog
from tests.ingest.rig import RUN, served

ROLLOUTS = Path(__file__).parent.parent / "data" / "rollouts.parquet"


def submit(address: str, *flags: str, run_id: str = RUN) -> int:
    return main([f"--rollouts={ROLLOUTS}", f"--to={address}", f"--run_id={run_id}", *flags])


def test_everything_arrives_as_it_was_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = RecordedRollouts(ROLLOUTS, TrajectoryLimits(tokens_per_row=4096, vocab_size=1 << 30))
    with served(FakeLog(group_size=8)) as where:
        assert submit(where.address, "--producers=3") == 0
        taken = {trajectory.key: trajectory for trajectory in where.log.taken}
    assert "384 accepted, 0 duplicates" in capsys.readouterr().out
    assert len(where.log.taken) == len(taken) == 384
    assert len({producer for producer, _ in where.log.order}) == 3
    for group in recorded.groups():
        for member in group.trajectories:
            assert taken[member.key].same_content(member)
            assert taken[member.key].finish_reason == member.finish_reason


def test_a_second_call_goes_on_where_the_first_one_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with served(FakeLog(group_size=8)) as where:
        assert submit(where.address) == 0
        assert submit(where.address) == 0
        assert "0 accepted, 0 duplicates, 384 sent before" in capsys.readouterr().out
        assert submit(where.address, "--name=another") == 0
        assert "0 accepted, 384 duplicates" in capsys.readouterr().out
        assert len(where.log.taken) == 768
    assert where.log.assembler.ledger().duplicates == 384


def test_rollouts_may_follow_the_policy_version() -> None:
    with served(FakeLog(group_size=8)) as where:
        where.server.board.publish(5)
        # At this pace the version is known before the second rollout.
        assert submit(where.address, "--follow_policy", "--per_second=300") == 0
    assert where.log.taken[-1].policy_version == 5


def test_what_cannot_be_done_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as where:
        assert submit(where.address, run_id="another") == 1
        assert "WRONG_RUN" in capsys.readouterr().err
        (tmp_path / "no.parquet").write_bytes(b"no")
        assert main([f"--rollouts={tmp_path}/no.parquet", f"--to={where.address}"]) == 2
        assert "no.parquet" in capsys.readouterr().err
        assert main([f"--rollouts={ROLLOUTS}", "--to=nowhere"]) == 2
        assert "nowhere" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            submit(where.address, "--producers=0")
