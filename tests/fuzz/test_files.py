"""Files that a person or another process wrote: traces, the epoch, recipes, plans, recorded rollouts."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import check_trace
from orchestrator.packing.layout import StepPlan
from orchestrator.recipes.keys import KEYS
from orchestrator.recipes.load import parse_recipe
from orchestrator.recipes.resolve import resolve
from orchestrator.recipes.values import RecipeError
from orchestrator.sources.parquet import ParquetLimits, RecordedRollouts
from orchestrator.trajectory import PackingError, RolloutError, TrajectoryLimits
from prestage.trace import (
    DeviceRecord,
    TraceError,
    TraceRecord,
    TraceWriter,
    read_trace,
    to_perfetto,
)
from tests.fuzz.harness import guarded, mutated, spoil
from tests.groups.test_parquet import TYPES, rows, save
from trainer_worker.epoch_file import EpochFile, StateFolderError

# The folder is one for all examples: each overwrites its file.
FILES = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


# -- traces ---------------------------------------------------------------------------------------


def _good_trace(folder: Path) -> bytes:
    writer = TraceWriter(folder / "good.ndjson", side="worker", clock_origin_s=1.5)
    for seq, call in enumerate(("open_run", "compile", "fwd_bwd", "update"), 1):
        writer.write(TraceRecord(side="worker", call=call, seq=seq, step=0, index=0, seconds=0.25))
    writer.write(DeviceRecord(kind="fwd_bwd", step=0, index=0, started_s=1.0, finished_s=2.0))
    writer.close()
    return (folder / "good.ndjson").read_bytes()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@st.composite
def odd_trace(draw: st.DrawFn) -> bytes:
    """Lines of JSON whose fields hold anything."""
    lines: list[object] = [{"type": "header", "format": 1, "side": "worker"}]
    if draw(st.booleans()):
        lines[0] = {**lines[0], "clock_origin_s": draw(values)}  # type: ignore[dict-item]
    for _ in range(draw(st.integers(0, 3))):
        line: dict[str, object] = {"type": draw(st.sampled_from(("call", "device", "x")))}
        for name in ("side", "call", "seq", "epoch", "step", "index", "started_s", "kind"):
            if draw(st.booleans()):
                line[name] = draw(values)
        lines.append(line)
    return "\n".join(json.dumps(line) for line in lines).encode()


@pytest.fixture(scope="module")
def good_trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _good_trace(tmp_path_factory.mktemp("trace"))


@FILES
@given(data=st.data())
def test_any_trace_is_read_or_refused_by_line(
    tmp_path: Path, good_trace: bytes, data: st.DataObject
) -> None:
    content = data.draw(st.binary(max_size=300) | mutated(good_trace) | odd_trace())
    path = tmp_path / "t.ndjson"
    path.write_bytes(content)
    trace = guarded(lambda: read_trace(path), errors=(TraceError,), most_bytes=8 << 20)
    code = check_trace.main([str(path)])
    assert code in ((0, 1) if trace is not None else (2,))
    if trace is not None:
        json.loads(to_perfetto([trace]))


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"type": "call", "seq": ' + "9" * 5000 + "}",
        '{"type": "call", "side": "worker", "call": "x", "seq": 1e999}',
        '{"type": "call", "side": "worker", "call": "x", "seconds": NaN}',
        '{"type": "call", "side": ["worker"], "call": "x"}',
        '{"type": "device", "kind": "fwd_bwd", "step": true, "index": 0}',
    ],
)
def test_lines_that_break_readers(tmp_path: Path, good_trace: bytes, line: str) -> None:
    path = tmp_path / "t.ndjson"
    path.write_bytes(good_trace + line.encode() + b"\n")
    with pytest.raises(TraceError, match=r"t\.ndjson:7"):
        read_trace(path)


# -- the epoch ------------------------------------------------------------------------------------


@FILES
@given(content=st.binary(max_size=40) | st.from_regex(r"[0-9\s]{0,30}", fullmatch=True))
def test_any_epoch_file_counts_on_or_is_refused(tmp_path: Path, content: bytes | str) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "epoch").write_bytes(data)
    found = guarded(lambda: EpochFile(tmp_path), errors=(StateFolderError,), most_bytes=1 << 20)
    if found is not None:
        assert found.epoch == int(data.decode().strip())
        assert found.advance() == found.epoch < 2**63


def test_an_epoch_file_of_any_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_bytes(b"1" * (8 << 20))
    with pytest.raises(StateFolderError, match="damaged"):
        guarded(lambda: EpochFile(tmp_path), errors=(), most_bytes=1 << 20)


# -- recipes --------------------------------------------------------------------------------------

RECIPES = sorted((Path(__file__).parents[2] / "deploy" / "recipes").glob("*.yaml"))
texts = st.text(max_size=200) | st.text(
    alphabet="abk: -[]{}&*!<>|'\"#\n\t1.e,?%@", min_size=1, max_size=120
)


@FILES
@given(data=st.data())
def test_any_recipe_is_resolved_or_refused(data: st.DataObject) -> None:
    good = data.draw(st.sampled_from(RECIPES)).read_bytes()
    content = data.draw(texts | mutated(good).map(lambda raw: raw.decode(errors="replace")))
    guarded(
        lambda: resolve(parse_recipe(content, "recipe.yaml"), {}),
        errors=(RecipeError,),
        most_bytes=16 << 20,
    )


@FILES
@given(
    recipe=st.dictionaries(
        st.sampled_from(sorted(KEYS)),
        st.text(max_size=30)
        | st.sampled_from(
            ("1", "0", "-1", "true", "nan", "inf", "1e400", "9" * 5000, "1" * 100, "")
        ),
        max_size=6,
    )
)
def test_any_value_of_any_key_is_resolved_or_refused(recipe: dict[str, str]) -> None:
    guarded(lambda: resolve(recipe, {}), errors=(RecipeError,), most_bytes=8 << 20)


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 5_000,
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n",
        "a: &a {b: *a}\n",
        "!!python/object/apply:os.system ['true']",
        "name: !!python/name:os.system",
        "? [a, b]\n: c\n",
    ],
)
def test_what_other_loaders_stumble_over(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(text, "recipe.yaml")


# -- plans ----------------------------------------------------------------------------------------


@FILES
@given(
    text=st.text(max_size=80)
    | values.map(json.dumps)
    | st.fixed_dictionaries(
        {
            "format": st.just(1) | values,
            "rows": values,
            "tokens_per_row": values,
            "ranks": values,
            "micro_batches": st.lists(st.lists(st.lists(values, max_size=6), max_size=2)) | values,
        }
    ).map(json.dumps)
)
def test_any_step_plan_is_read_or_refused(text: str) -> None:
    guarded(lambda: StepPlan.from_json(text), errors=(PackingError,), most_bytes=4 << 20)


# -- recorded rollouts ----------------------------------------------------------------------------

LIMITS = TrajectoryLimits(tokens_per_row=2048, vocab_size=49152)
SPOILED = 250


def _read_all(path: Path, limits: ParquetLimits) -> None:
    for group in RecordedRollouts(path, LIMITS, parquet_limits=limits).groups():
        assert group.trajectories


def spoiled_files(folder: Path, first_seed: int, count: int) -> None:
    """In a process of its own, whose memory is limited: the reader is C++."""
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    pa.set_cpu_count(1)
    good = (folder / "good.parquet").read_bytes()
    path = folder / "spoiled.parquet"
    ends = {"read": 0, "refused": 0}
    for seed in range(first_seed, first_seed + count):
        path.write_bytes(spoil(good, seed))
        try:
            _read_all(path, ParquetLimits(max_row_group_bytes=64 << 20))
            ends["read"] += 1
        except RolloutError as error:
            assert len(str(error)) < 4000, seed
            ends["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    print(json.dumps(ends))


def test_spoiled_recorded_rollouts_are_read_or_refused(tmp_path: Path) -> None:
    save(tmp_path / "good.parquet", rows(groups=40, size=4), row_group_size=50)
    code = (
        f"from tests.fuzz.test_files import *; spoiled_files(Path({str(tmp_path)!r}), 0, {SPOILED})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    ends = json.loads(done.stdout)
    assert sum(ends.values()) == SPOILED
    assert ends["refused"] > SPOILED // 4, "the changes must matter"


def test_a_file_that_unpacks_to_far_more_than_it_is(tmp_path: Path) -> None:
    """Small on disk, large in memory: refused by what its own index says."""
    table = pa.table(
        {
            name: pa.array(
                [[7] * 200_000 if name == "completion_tokens" else row[name] for row in rows(20, 2)]
                if name != "logprobs"
                else [[-0.5] * 200_000 for _ in rows(20, 2)],
                kind,
            )
            for name, kind in TYPES.items()
        }
    )
    path = tmp_path / "bomb.parquet"
    for dictionary in (False, True):  # The latter repeats values in a few bytes.
        pq.write_table(table, path, compression="zstd", use_dictionary=dictionary)
        assert path.stat().st_size < 1 << 20
        with pytest.raises(RolloutError, match="row group 0 holds"):
            guarded(
                lambda: _read_all(path, ParquetLimits(max_row_group_bytes=16 << 20)),
                errors=(),
                most_bytes=8 << 20,
            )


def test_a_group_of_two_billion_members_is_refused_without_a_list_of_them(tmp_path: Path) -> None:
    table = rows(groups=2, size=2)
    table[-1]["index_in_group"] = 2**31 - 1
    path = save(tmp_path / "huge.parquet", table)
    with pytest.raises(RolloutError, match="has no member 2"):
        guarded(lambda: _read_all(path, ParquetLimits()), errors=(), most_bytes=8 << 20)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "good.parquet", rows())
    damaged = path.read_bytes().replace(b"g1", b"g\xff")
    path.write_bytes(damaged)
    with pytest.raises(RolloutError):
        _read_all(path, ParquetLimits())
