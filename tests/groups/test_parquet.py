"""Recorded rollouts: read strictly; anything wrong is one error that names it."""

from __future__ import annotations

import math
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.sources.parquet import ParquetLimits, RecordedRollouts
from orchestrator.trajectory import SourceError, TrajectoryLimits

RECORDED = Path(__file__).parents[1] / "data" / "rollouts.parquet"
LIMITS = TrajectoryLimits(tokens_per_row=2048, vocab_size=49152)

TYPES = {
    "group_id": pa.string(),
    "index_in_group": pa.int32(),
    "prompt_tokens": pa.list_(pa.int32()),
    "completion_tokens": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "reward": pa.float32(),
    "policy_version": pa.int32(),
}


def rows(groups: int = 3, size: int = 2) -> list[dict[str, object]]:
    return [
        {
            "group_id": f"g{group}",
            "index_in_group": index,
            "prompt_tokens": [1, 2, 3],
            "completion_tokens": [4, 5],
            "logprobs": [-0.5, -0.25],
            "reward": float(index),
            "policy_version": 0,
        }
        for group in range(groups)
        for index in range(size)
    ]


def save(path: Path, table: list[dict[str, object]], types=None, row_group_size=None) -> Path:
    types = dict(TYPES if types is None else types)
    columns = {name: pa.array([row[name] for row in table], kind) for name, kind in types.items()}
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def test_the_recorded_file_is_read_whole():
    recorded = RecordedRollouts(RECORDED, LIMITS)
    assert (recorded.group_count, recorded.group_size, recorded.trajectory_count) == (48, 8, 384)
    groups = list(recorded.groups())
    assert [group.group_id for group in groups[:2]] == [
        "train-chain_sum-000@0",
        "train-letter_counting-000@0",
    ]
    assert sum(t.completion_tokens.shape[0] for g in groups for t in g.trajectories) == 15908
    table = pq.read_table(RECORDED).to_pylist()
    flat = [member for group in groups for member in group.trajectories]
    for row, member in zip(table, flat, strict=True):
        assert member.completion_tokens.tolist() == row["completion_tokens"]
        assert member.sampling_logprobs.tolist() == row["logprobs"]
        assert member.reward == row["reward"] and member.task == row["task"]


def test_epochs_have_names_of_their_own_and_a_cursor_resumes(tmp_path):
    recorded = RecordedRollouts(save(tmp_path / "r.parquet", rows()), LIMITS)
    names = [group.group_id for group in recorded.groups(epochs=2)]
    assert names == ["g0@0", "g1@0", "g2@0", "g0@1", "g1@1", "g2@1"]
    for start in range(7):
        assert [g.group_id for g in recorded.groups(epochs=2, start=start)] == names[start:]
    endless = islice(recorded.groups(epochs=None, start=5), 3)
    assert [group.group_id for group in endless] == ["g2@1", "g0@2", "g1@2"]


def test_row_groups_do_not_show(tmp_path):
    whole = RecordedRollouts(save(tmp_path / "a.parquet", rows(5)), LIMITS)
    cut = RecordedRollouts(save(tmp_path / "b.parquet", rows(5), row_group_size=3), LIMITS)
    for left, right in zip(whole.groups(), cut.groups(), strict=True):
        assert left.group_id == right.group_id
        assert all(
            a.same_content(b) for a, b in zip(left.trajectories, right.trajectories, strict=True)
        )


def broken(place: int, **change: object) -> list[dict[str, object]]:
    table = rows()
    table[place].update(change)
    return table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (broken(3, logprobs=[-0.5]), "row 3: group 'g1' index 1: sampling_logprobs has 1 entries"),
        (broken(2, prompt_tokens=[1, 49152]), r"row 2: .*prompt_tokens\[1\] is 49152"),
        (broken(2, completion_tokens=[-3, 1]), r"row 2: .*completion_tokens\[0\] is -3"),
        (broken(4, logprobs=[-0.5, math.nan]), r"row 4: .*sampling_logprobs\[1\] is nan"),
        (broken(4, logprobs=[-0.5, 0.75]), r"row 4: .*sampling_logprobs\[1\] is 0.75"),
        (broken(5, reward=math.nan), "row 5: group 'g2' index 1: reward is nan"),
        (broken(5, reward=math.inf), "row 5: .*reward is inf"),
        (broken(1, completion_tokens=[], logprobs=[]), "row 1: .*completion_tokens is empty"),
        (broken(1, prompt_tokens=[1] * 2047), "row 1: .*2049 tokens .* row of 2048"),
        (rows()[:3] + rows()[4:], "group 'g1' has no member 1"),
        (rows()[:2] + rows()[3:], "group 'g1' has no member 0"),
        (broken(3, index_in_group=0), "row 3: group 'g1' has index 0 twice"),
        (broken(3, index_in_group=-1), "row 3: group 'g1' index -1|index is -1"),
        (rows()[:2] * 2, "row 2: group 'g0' has index 0 twice"),
        (rows()[:4] + rows()[:2], "group 'g0' comes again after other groups"),
        (broken(2, reward=None), "row 2: column 'reward' is null"),
        (broken(2, group_id=None), "row 2: column 'group_id' is null"),
        (broken(2, logprobs=None), "row 2: column 'logprobs' is null"),
        (broken(2, logprobs=[None, -1.0]), "row 2: column 'logprobs' holds a null at position 0"),
        (broken(2, policy_version=-1), "row 2: .*policy_version is -1"),
        (broken(0, group_id=""), "row 0: .*group_id is empty"),
        ([], "no rows"),
    ],
)
@pytest.mark.parametrize("row_group_size", [None, 1])
def test_bad_rows_are_named(tmp_path, table, message, row_group_size):
    path = save(tmp_path / "bad.parquet", table, row_group_size=row_group_size)
    with pytest.raises(SourceError, match=message) as error:
        RecordedRollouts(path, LIMITS)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": pa.int32()}, "unknown column 'extra'"),
        ({"reward": pa.float64()}, "column 'reward' is double; it must be float"),
        ({"prompt_tokens": pa.list_(pa.int64())}, "'prompt_tokens' is list<.*int64>; it must be"),
        ({"group_id": pa.large_string()}, "'group_id' is large_string"),
    ],
)
def test_bad_columns_are_named(tmp_path, change, message):
    table = [{**row, "extra": 1} for row in rows()]
    path = save(tmp_path / "bad.parquet", table, {**TYPES, **change})
    with pytest.raises(SourceError, match=message):
        RecordedRollouts(path, LIMITS)


@pytest.mark.parametrize("name", TYPES)
def test_a_missing_column_is_named(tmp_path, name):
    types = {key: kind for key, kind in TYPES.items() if key != name}
    with pytest.raises(SourceError, match=f"column {name!r} is missing"):
        RecordedRollouts(save(tmp_path / "bad.parquet", rows(), types), LIMITS)


def test_what_is_no_parquet_file_is_refused(tmp_path):
    text = tmp_path / "text.parquet"
    text.write_text("not parquet")
    with pytest.raises(SourceError, match="not a readable Parquet file"):
        RecordedRollouts(text, LIMITS)
    pickled = tmp_path / "pickled.parquet"
    pickled.write_bytes(pickle.dumps(np.zeros(3)))
    with pytest.raises(SourceError, match="not a readable Parquet file"):
        RecordedRollouts(pickled, LIMITS)
    with pytest.raises(SourceError, match="cannot be read"):
        RecordedRollouts(tmp_path / "absent.parquet", LIMITS)
    with pytest.raises(SourceError, match="not a file"):
        RecordedRollouts(tmp_path, LIMITS)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(RECORDED.read_bytes()[:-100])
    with pytest.raises(SourceError, match="not a readable Parquet file"):
        RecordedRollouts(cut, LIMITS)


def test_a_damaged_page_is_an_error_not_a_wrong_number(tmp_path):
    data = bytearray(RECORDED.read_bytes())
    data[1000:1400] = bytes(400)
    path = tmp_path / "damaged.parquet"
    path.write_bytes(bytes(data))
    with pytest.raises(SourceError):
        RecordedRollouts(path, LIMITS)


def test_sizes_are_bounded(tmp_path):
    path = save(tmp_path / "r.parquet", rows())
    for limits, message in (
        (ParquetLimits(max_rows=5), "6 rows; at most 5"),
        (ParquetLimits(max_file_bytes=10), "at most 10 are read"),
        (ParquetLimits(max_row_group_bytes=10), "row group 0 holds"),
    ):
        with pytest.raises(SourceError, match=message):
            RecordedRollouts(path, LIMITS, parquet_limits=limits)


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path):
    path = save(tmp_path / "r.parquet", rows())
    recorded = RecordedRollouts(path, LIMITS)
    save(path, rows(4))
    with pytest.raises(SourceError, match="changed while the run reads it"):
        next(recorded.groups())


def test_a_stated_group_size_is_held_to(tmp_path):
    path = save(tmp_path / "r.parquet", rows())
    with pytest.raises(SourceError, match="group 'g0' has no member 2; each group has 3"):
        RecordedRollouts(path, LIMITS, group_size=3)
    with pytest.raises(SourceError, match="group 'g0' has a member 1; groups have members 0 to 0"):
        RecordedRollouts(path, LIMITS, group_size=1)
