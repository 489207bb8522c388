"""Checkpoints and weight export of the jax engine, without a server.

1. Restore and go on is bit-identical to never stopping: parameters, moments, schedule.
2. A kill at any write boundary leaves a checkpoint that restores; torn files are not trusted.
3. Retention, re-saves, a full disk, changed bytes, and a save that a later update cannot change.
4. A pinned version never mixes with the next one.
"""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from tests.support.rig import FIELDS
from trainer_worker.engine import CompileSpec, EngineError, RunPosition
from trainer_worker.engines.jax_engine import engine as jax_engine
from trainer_worker.engines.jax_engine.checkpoints import JaxCheckpoints, host_copy, sha256_of
from trainer_worker.engines.jax_engine.config import EngineConfig, ModelConfig, OptimizerConfig
from trainer_worker.engines.jax_engine.engine import JaxEngine
from trainer_worker.engines.jax_engine.model import init_params
from trainer_worker.engines.jax_engine.weights import JaxWeights

MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=24,
    query_block=32,
)
CONFIG = EngineConfig(
    model=MODEL,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
    logprob_chunk=32,
)
SHAPE = SyntheticShape(micro_batches=2)
SPEC = CompileSpec(rows=SHAPE.rows, tokens_per_row=SHAPE.tokens_per_row, fields=FIELDS)


class Killed(BaseException):
    """The process is gone: nothing of ours may clean up after it."""


@pytest.fixture(scope="module", autouse=True)
def compile_once() -> Iterator[None]:
    made: dict[object, object] = {}
    original = jax_engine.compile_programs

    def compile_programs(config, state, spec):  # type: ignore[no-untyped-def]
        key = (config, spec)
        if key not in made:
            made[key] = original(config, state, spec)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_engine, "compile_programs", compile_programs)
        yield


def engine(seed: int = 0) -> JaxEngine:
    made = JaxEngine(CONFIG, init_params(MODEL, seed))
    made.compile(SPEC)
    return made


def train(trained: JaxEngine, steps: range) -> None:
    for step in steps:
        for index in range(SHAPE.micro_batches):
            batch = make_batch(SHAPE, "run", step, index)
            trained.fwd_bwd(trained.prepare_fwd_bwd_input(batch))
        assert trained.update().applied


def at(steps: int) -> RunPosition:
    return RunPosition(
        run_id="run",
        step=steps,
        train_step=steps,
        epoch=3,
        last_seq=7,
        data_cursor=f'{{"item": {steps}}}',
    )


def bits(trained: JaxEngine) -> dict[str, str]:
    return {name: sha256_of(array) for name, array in host_copy(trained.state).items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def two_steps() -> dict[int, JaxEngine]:
    """Engines after 1 and 2 steps; tests only save them."""
    made = {steps: engine() for steps in (1, 2)}
    for steps, trained in made.items():
        train(trained, range(steps))
    return made


def test_restore_and_go_on_is_bit_identical_to_never_stopping(tmp_path: Path) -> None:
    straight = engine()
    train(straight, range(4))
    first = engine()
    train(first, range(2))
    JaxCheckpoints(first, tmp_path).begin_save(at(2)).wait()
    saved = bits(first)

    second = engine(seed=9)
    # An open step and its gradients must not leak into what is restored.
    second.fwd_bwd(second.prepare_fwd_bwd_input(make_batch(SHAPE, "run", 0, 0)))
    store = JaxCheckpoints(second, tmp_path)
    assert store.durable_step() == 2
    assert store.restore(None) == at(2)
    assert bits(second) == saved
    assert second.train_step == 2 and second.open_micro_batches == 0
    train(second, range(2, 4))
    assert bits(second) == bits(straight) != saved
    assert second.train_step == straight.train_step == 4
    assert second.parameter_digest() == straight.parameter_digest()
    # What was loaded is what is on disk: later updates did not write into it.
    assert JaxCheckpoints(engine(), tmp_path).restore(2) == at(2)


def test_a_save_is_of_its_step_although_the_next_update_ran_before_it_was_written(
    tmp_path: Path,
) -> None:
    trained = engine()
    train(trained, range(1))
    before = bits(trained)
    save = JaxCheckpoints(trained, tmp_path).begin_save(at(1))
    train(trained, range(1, 2))
    save.wait()
    restored = engine(seed=5)
    assert JaxCheckpoints(restored, tmp_path).restore(1) == at(1)
    assert bits(restored) == before != bits(trained)


def test_a_save_with_a_step_open_or_of_another_version_is_refused(tmp_path: Path) -> None:
    trained = engine()
    store = JaxCheckpoints(trained, tmp_path)
    with pytest.raises(EngineError, match="train_step is 2, the engine's is 0"):
        store.begin_save(at(2))
    trained.fwd_bwd(trained.prepare_fwd_bwd_input(make_batch(SHAPE, "run", 0, 0)))
    with pytest.raises(EngineError, match="while a step is open"):
        store.begin_save(at(0))
    assert names(tmp_path) == []


def test_r31_none_found_is_none(tmp_path: Path, two_steps: dict[int, JaxEngine]) -> None:
    store = JaxCheckpoints(two_steps[1], tmp_path / "absent")
    assert store.durable_step() is None and store.restore(None) is None
    store.begin_save(at(1)).wait()
    assert store.restore(7) is None


def boundaries(folder: Path, trained: dict[int, JaxEngine]) -> list[str]:
    """Every write boundary of a save that also retires an older checkpoint."""
    seen: list[str] = []
    JaxCheckpoints(trained[1], folder, keep=1).begin_save(at(1)).wait()
    store = JaxCheckpoints(trained[2], folder, keep=1, fault=lambda name, path: seen.append(name))
    store.begin_save(at(2)).wait()
    return seen


@pytest.mark.parametrize("torn", [False, True])
def test_r34_a_kill_at_every_write_boundary_leaves_a_usable_checkpoint(
    tmp_path: Path, two_steps: dict[int, JaxEngine], torn: bool
) -> None:
    """Torn: a file that was written but not yet synced lost its second half."""
    every = boundaries(tmp_path / "whole", two_steps)
    assert len(every) == len(set(every)) >= 12
    reader, survivors = engine(), []
    expected = {steps: bits(trained) for steps, trained in two_steps.items()}
    for number, boundary in enumerate(every):
        folder = tmp_path / str(number)
        JaxCheckpoints(two_steps[1], folder, keep=1).begin_save(at(1)).wait()

        def kill(name: str, path: Path, boundary: str = boundary) -> None:
            if name == boundary:
                if torn and name in ("tensors", "manifest", "marker"):
                    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
                raise Killed

        with pytest.raises(Killed):
            JaxCheckpoints(two_steps[2], folder, keep=1, fault=kill).begin_save(at(2)).wait()
        store = JaxCheckpoints(reader, folder, keep=1)
        steps = store.durable_step()
        assert steps in (1, 2), boundary
        survivors.append(steps)
        assert store.restore(None) == at(steps), boundary
        assert bits(reader) == expected[steps], boundary
        # The next process saves the step again, and leaves nothing behind.
        JaxCheckpoints(two_steps[2], folder, keep=1).begin_save(at(2)).wait()
        assert store.durable_step() == 2
    assert survivors == [1] * every.index("renamed") + [2] * (len(every) - every.index("renamed"))


@pytest.mark.parametrize("name", ["COMPLETE", "manifest.json", "state.safetensors"])
def test_r34_a_folder_that_lacks_a_file_is_not_trusted_and_can_be_saved_again(
    tmp_path: Path, two_steps: dict[int, JaxEngine], name: str
) -> None:
    store = JaxCheckpoints(two_steps[2], tmp_path)
    JaxCheckpoints(two_steps[1], tmp_path).begin_save(at(1)).wait()
    store.begin_save(at(2)).wait()
    (tmp_path / "step-2" / name).unlink()
    assert store.durable_step() == 1
    store.begin_save(at(2)).wait()
    assert store.durable_step() == 2


def test_e7_r30_older_ones_go_only_after_the_new_one_is_durable(
    tmp_path: Path, two_steps: dict[int, JaxEngine]
) -> None:
    JaxCheckpoints(two_steps[1], tmp_path, keep=1).begin_save(at(1)).wait()
    seen: dict[str, list[str]] = {}
    store = JaxCheckpoints(
        two_steps[2],
        tmp_path,
        keep=1,
        fault=lambda name, path: seen.update({name: names(tmp_path)}),
    )
    store.begin_save(at(2)).wait()
    assert seen["folder synced"] == ["step-1", "step-2"]
    assert names(tmp_path) == ["step-2"]


def test_retention_keeps_what_it_was_told_and_always_the_one_just_saved(tmp_path: Path) -> None:
    trained = engine()
    store = JaxCheckpoints(trained, tmp_path, keep=2)
    for steps in range(1, 5):
        train(trained, range(steps - 1, steps))
        store.begin_save(at(steps)).wait()
    assert names(tmp_path) == ["step-3", "step-4"]
    assert store.restore(3) == at(3)
    shutil.rmtree(tmp_path / "step-3")
    JaxCheckpoints(trained, tmp_path, keep=1).begin_save(at(3)).wait()
    assert names(tmp_path) == ["step-3"]


def test_a_second_save_of_a_step_is_a_no_op_if_it_is_the_same_and_refused_if_not(
    tmp_path: Path, two_steps: dict[int, JaxEngine]
) -> None:
    store = JaxCheckpoints(two_steps[1], tmp_path)
    store.begin_save(at(1)).wait()

    def stamps() -> dict[str, int]:
        return {p.name: p.stat().st_mtime_ns for p in (tmp_path / "step-1").iterdir()}

    before = stamps()
    store.begin_save(replace(at(1), epoch=4, last_seq=1)).wait()
    assert stamps() == before
    with pytest.raises(EngineError, match=r"already committed .* another run_id"):
        store.begin_save(replace(at(1), run_id="other")).wait()
    other = engine(seed=3)
    train(other, range(1))
    with pytest.raises(EngineError, match=r"already committed .* another params/"):
        JaxCheckpoints(other, tmp_path).begin_save(at(1)).wait()
    assert stamps() == before


def test_r32_a_full_disk_is_raised_by_wait_and_the_previous_one_stays(
    tmp_path: Path, two_steps: dict[int, JaxEngine]
) -> None:
    JaxCheckpoints(two_steps[1], tmp_path).begin_save(at(1)).wait()

    def full(name: str, path: Path) -> None:
        if name == "tensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    store = JaxCheckpoints(two_steps[2], tmp_path, fault=full)
    save = store.begin_save(at(2))
    with pytest.raises(OSError, match="No space left"):
        save.wait()
    assert names(tmp_path) == ["step-1"] and store.durable_step() == 1


def test_r32_a_write_that_the_system_refuses_is_raised_as_an_os_error(
    tmp_path: Path, two_steps: dict[int, JaxEngine]
) -> None:
    store = JaxCheckpoints(two_steps[1], tmp_path)
    save = store.begin_save(at(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"state\.safetensors could not be written"):
            save.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == [] and store.durable_step() is None
    save.wait()
    assert store.durable_step() == 1


def test_changed_bytes_are_an_error_that_changes_nothing(
    tmp_path: Path, two_steps: dict[int, JaxEngine]
) -> None:
    JaxCheckpoints(two_steps[2], tmp_path).begin_save(at(2)).wait()
    data = tmp_path / "step-2" / "state.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    reader = engine()
    before = bits(reader)
    with pytest.raises(EngineError, match="are not those that were written"):
        JaxCheckpoints(reader, tmp_path).restore(None)
    assert bits(reader) == before and reader.train_step == 0


def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, two_steps: dict[int, JaxEngine]
) -> None:
    JaxCheckpoints(two_steps[2], tmp_path).begin_save(at(2)).wait()
    model = replace(MODEL, ffn_size=32)
    other = JaxEngine(replace(CONFIG, model=model), init_params(model, 0))
    with pytest.raises(EngineError, match="start the worker with the model that made it"):
        JaxCheckpoints(other, tmp_path).restore(2)


# -- weight export --------------------------------------------------------------------------------


def test_a_pinned_version_is_not_changed_by_the_next_update(tmp_path: Path) -> None:
    trained = engine()
    weights = JaxWeights(trained)
    train(trained, range(1))
    expected = {
        name: np.array(leaf) for name, leaf in jax_engine.named_leaves(trained.state.params).items()
    }
    total = sum(array.nbytes for array in expected.values())
    assert weights.prepare_weight_sync(total) == total
    first = {info.name: info for info in weights.export_manifest(1)}
    assert "layers/wq" in first and set(first) == set(expected)
    read = {name: weights.export_tensor(1, name) for name in sorted(first)[::2]}
    train(trained, range(1, 2))
    assert weights.prepare_weight_sync(total) == total
    read |= {name: weights.export_tensor(1, name) for name in sorted(first)[1::2]}
    for name, array in read.items():
        np.testing.assert_array_equal(array, expected[name])
        assert (first[name].dtype, first[name].shape) == ("float32", array.shape)
        assert first[name].digest == sha256_of(array)
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    second = {info.name: info.digest for info in weights.export_manifest(2)}
    assert all(second[name] != info.digest for name, info in first.items())

    path = weights.write_safetensors(tmp_path, 1)
    assert names(tmp_path) == ["weights-1.safetensors"]
    on_disk = load_file(path)
    assert {name: sha256_of(array) for name, array in on_disk.items()} == {
        name: info.digest for name, info in first.items()
    }

    weights.release_weight_sync(1)
    with pytest.raises(EngineError, match=r"version 1 is not pinned; pinned: \[2\]"):
        weights.export_manifest(1)


def test_a_pin_over_its_budget_is_refused_before_a_copy() -> None:
    trained = engine()
    weights = JaxWeights(trained)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(trained.state.params))
    with pytest.raises(MemoryError, match=f"takes {total} bytes; the budget is {total - 1}"):
        weights.prepare_weight_sync(total - 1)
    with pytest.raises(EngineError, match="not pinned"):
        weights.export_manifest(0)


def test_a_pinned_version_is_never_replaced_by_other_weights() -> None:
    trained, other = engine(), engine(seed=4)
    weights = JaxWeights(trained)
    weights.prepare_weight_sync(1 << 30)
    before = weights.export_manifest(0)
    weights.prepare_weight_sync(1 << 30)
    trained.restore_state(other.state, 0)
    with pytest.raises(EngineError, match="pinned with other weights"):
        weights.prepare_weight_sync(1 << 30)
    assert weights.export_manifest(0) == before
    with pytest.raises(EngineError, match="no parameter 'nope'"):
        weights.export_tensor(0, "nope")
