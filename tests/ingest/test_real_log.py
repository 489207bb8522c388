"""The service on the real journal: what the fake one promises holds there too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchestrator.client import RolloutProducer, given, sampled
from orchestrator.ingest.server import IngestServer
from orchestrator.journal.config import LiveConfig
from orchestrator.journal.open import LiveRun, open_live
from tests.ingest.processes import journal_of
from tests.ingest.rig import RUN, rollout
from tests.support.rig import socket_folder


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    with socket_folder() as folder:
        yield folder


@contextlib.contextmanager
def served(config: LiveConfig) -> Iterator[tuple[LiveRun, str]]:
    address = f"unix://{config.folder}.sock"
    run = open_live(config)
    server = IngestServer(run.log, run_id=RUN, listen=address)
    server.start()
    try:
        yield run, address
    finally:
        server.stop(finished=False)
        run.close()


def settings(folder: Path, *, extra: int = 0) -> LiveConfig:
    config = journal_of(folder, extra=extra)
    return replace(config, policy=replace(config.policy, group_size=2))


def producer(address: str) -> RolloutProducer:
    return RolloutProducer(address, producer="p", run_id=RUN, unreachable_s=20)


def test_d12_a_failed_member_is_durable_and_ends_its_group(folder: Path) -> None:
    config = settings(folder)
    with served(config) as (run, address), producer(address) as client:
        client.submit(rollout("g", 0))
        receipt = client.fail("g", 1).result(timeout=20)
        assert (receipt.accepted, receipt.reason) == (False, "producer_failed")
        before = run.source.ledger()
        before.check()
        assert run.log.gauges().open_groups == 0
    with served(config) as (run, address):
        assert run.source.ledger() == before
        with producer(address) as client:
            assert client.next_offset(timeout_s=20) == 2
            late = client.submit(rollout("g", 1)).result(timeout=20)
            assert late.duplicate or late.reason == "group_already_dropped"


def test_several_turns_are_kept_as_they_came(folder: Path) -> None:
    config = settings(folder)
    turns = (
        given([1, 2]),
        sampled([3, 4], [-0.5, -1.5], loss_mask=[0, 1]),
        given([5]),
        sampled([6], [-2.0]),
    )
    with served(config) as (run, address), producer(address) as client:
        for index in range(2):
            client.submit(replace(rollout("g", index), segments=turns)).result(timeout=20)
    with served(config) as (run, _):
        (group,) = run.log.waiting_groups(0)
        kept = run.log.load(group.members[0])
    assert kept.prompt_tokens.tolist() == [1, 2]
    assert kept.completion_tokens.tolist() == [3, 4, 5, 6]
    assert kept.loss_mask is not None and kept.loss_mask.tolist() == [0, 0, 0, 1, 0, 1]
    assert kept.sampling_logprobs is not None
    np.testing.assert_array_equal(
        kept.sampling_logprobs, np.array([-0.5, -1.5, 0.0, -2.0], np.float32)
    )


def test_an_offset_that_came_before_is_not_counted_again(folder: Path) -> None:
    with served(settings(folder)) as (run, address):
        with producer(address) as client:
            client.submit(rollout("g", 0)).result(timeout=20)
            assert client.submit(rollout("g", 0)).result(timeout=20).duplicate
        totals = run.log.totals()
        assert (totals.tokens_in, totals.duplicates) == (5, 1)
