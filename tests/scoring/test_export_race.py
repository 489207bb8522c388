"""An export never mixes two versions, whatever happens to the pins while it streams.

A worker whose weights say which update (and which restore) made them is exported without pause, while
it trains, pins, releases and goes back: every export that ends well is of one moment, by its own
manifest; every other one says that its version is gone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from orchestrator.bench.conformance.driver import Driver, Refused, answer_of
from prestage.protocol import Call, Reason
from prestage.trainer.v1 import trainer_pb2 as pb
from tests.support.rig import FAST, address_of, served
from trainer_worker.clock import RealClock
from trainer_worker.engine import EngineError, EngineParts, TensorInfo
from trainer_worker.engines.timed import create_timed

TENSORS, SIZE = 8, 512


class Marked:
    """Weights that all hold the number of the life that made them. `on_tensor`: in an export."""

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
        self._lock = threading.Lock()
        self._pinned: dict[int, tuple[tuple[TensorInfo, ...], npt.NDArray[np.int32]]] = {}
        self.life = 0
        self.on_tensor: Callable[[str], None] = lambda name: None

    def prepare_weight_sync(self, memory_budget_bytes: int) -> int:
        del memory_budget_bytes
        self.life += 1
        values = np.full(SIZE, self.life, np.int32)
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        manifest = tuple(
            TensorInfo(name=f"t{number}", dtype="int32", shape=(SIZE,), digest=digest)
            for number in range(TENSORS)
        )
        with self._lock:
            self._pinned[self._version()] = (manifest, values)
        return values.nbytes * TENSORS

    def _of(self, version: int) -> tuple[tuple[TensorInfo, ...], npt.NDArray[np.int32]]:
        with self._lock:
            if version not in self._pinned:
                raise EngineError(f"version {version} is not pinned")
            return self._pinned[version]

    def export_manifest(self, version: int) -> tuple[TensorInfo, ...]:
        return self._of(version)[0]

    def export_tensor(self, version: int, name: str) -> npt.NDArray[np.int32]:
        self.on_tensor(name)
        return self._of(version)[1]

    def release_weight_sync(self, version: int) -> None:
        with self._lock:
            self._pinned.pop(version, None)


def marked() -> tuple[EngineParts, Marked]:
    parts = create_timed(replace(FAST, fwd_bwd_seconds=0.0, update_seconds=0.0), RealClock())
    weights = Marked(lambda: parts.training.train_step)
    return replace(parts, weights=weights), weights


def export(driver: Driver, version: int) -> set[int]:
    """The lives that an export's values are of. Raises `Refused`."""
    request = pb.ExportWeightsRequest(
        run_id=driver.run_id, epoch=driver.epoch, version=version, chunk_bytes=1024
    )
    answers = answer_of(lambda: list(driver.stub.ExportWeights(request, timeout=30)))
    manifest = answers[0].manifest
    data = b"".join(answer.chunk for answer in answers)
    assert len(data) == manifest.total_bytes == answers[-1].end.total_bytes
    at = 0
    for tensor in manifest.tensors:
        part = data[at : at + tensor.bytes]
        assert hashlib.sha256(part).hexdigest() == tensor.digest, tensor.name
        at += tensor.bytes
    return {int(value) for value in np.frombuffer(data, np.int32)}


def step(driver: Driver, number: int) -> None:
    driver.put(driver.batch(number, 0))
    driver.call(Call.FWD_BWD_APPLY, number, 0)


def test_a_version_that_is_pinned_anew_in_an_export_is_not_mixed_with_the_old_one() -> None:
    parts, weights = marked()
    with served(parts) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        step(driver, 0)
        driver.call(Call.PREPARE_WEIGHT_SYNC)
        assert export(driver, 1) == {1}

        def replaced(name: str) -> None:
            if name == "t3":  # As a restore and a retraining of the step would leave it.
                weights.prepare_weight_sync(0)

        weights.on_tensor = replaced
        with pytest.raises(Refused) as refused:
            export(driver, 1)
        assert refused.value.reason is Reason.VERSION_NOT_PINNED
        assert "export it again" in refused.value.refusal.message
        weights.on_tensor = lambda name: None
        assert export(driver, 1) == {2}
        driver.close()


def test_exports_that_race_with_updates_pins_and_releases_are_of_one_version() -> None:
    parts, weights = marked()
    done = threading.Event()
    whole: list[set[int]] = []
    gone: list[Reason] = []
    wrong: list[BaseException] = []
    newest = [0]

    def export_without_pause(driver: Driver) -> None:
        try:
            while not done.is_set():
                try:
                    whole.append(export(driver, newest[0]))
                except Refused as error:
                    gone.append(error.reason)
        except BaseException as error:
            wrong.append(error)

    with served(parts) as server:
        driver = Driver(address=address_of(server))
        driver.open()
        driver.call(Call.COMPILE)
        exporters = [threading.Thread(target=export_without_pause, args=(driver,)) for _ in "ab"]
        for exporter in exporters:
            exporter.start()
        number = 0
        while number < 1000 and (number < 60 or len(whole) < 20) and not wrong:
            step(driver, number)
            number += 1
            driver.call(Call.PREPARE_WEIGHT_SYNC)
            newest[0] = number
            if number % 3 == 0:
                weights.prepare_weight_sync(0)  # The same version with other weights.
            if number > 2:
                driver.call(Call.RELEASE_WEIGHT_SYNC)
                driver.call(Call.PREPARE_WEIGHT_SYNC)
        done.set()
        for exporter in exporters:
            exporter.join(timeout=30)
        driver.close()
    assert not wrong
    assert len(whole) >= 20
    assert all(len(lives) == 1 for lives in whole)
    assert set(gone) <= {Reason.VERSION_NOT_PINNED}
