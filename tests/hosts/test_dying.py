"""Hosts that die, freeze or are told to end, as real processes: every other one ends, in stated time.

The timed engine has no collectives, so what is tested is who notices, how fast, and with which words.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from orchestrator.plan import RunPlan
from orchestrator.runner import RunFailed
from prestage.trainer.v1 import trainer_pb2 as pb
from tests.hosts.processes import Group, group_of, two_free_ports
from tests.hosts.rig import SHAPE
from tests.support.rig import run_against, socket_folder
from trainer_worker.hosts.link import DEAD_S
from trainer_worker.hosts.run import LINGER_S, LOST_EXIT_CODE

FLAGS = ("--engine=timed", "--timed_fwd_bwd_s=0.01", "--timed_update_s=0", "--timed_copy_s=0")
MARGIN_S = 5.0
"""For a busy machine."""
PLAN = RunPlan(num_steps=3, pipeline=True, stage=True, latch_after=1000)


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_folder() as made:
        yield made


def _run_in_background(group: Group, steps: int) -> tuple[threading.Thread, list[str]]:
    said: list[str] = []

    def run() -> None:
        try:
            run_against(
                group.address, RunPlan(num_steps=steps, pipeline=True, stage=True), shape=SHAPE
            )
        except (RunFailed, grpc.RpcError) as error:
            said.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, said


def _await_step(group: Group, step: int) -> None:
    limit_s = time.monotonic() + 30
    while group.state().step < step:
        assert time.monotonic() < limit_s, group.logs()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "notice_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, DEAD_S)], ids=["kill", "stop"]
)
def test_a_follower_that_dies_or_freezes_ends_the_run_in_time(
    folder: Path, number: signal.Signals, notice_s: float
) -> None:
    with group_of(folder, 3, FLAGS) as group:
        thread, said = _run_in_background(group, 100_000)
        _await_step(group, 3)
        gone_s = time.monotonic()
        group.signal(2, number)
        thread.join(timeout=notice_s + MARGIN_S)
        assert said and "host 2 is gone" in said[0], (said, group.logs())
        state = group.state()
        assert state.phase == pb.PHASE_FAILED and "host 2 is gone" in state.failure
        assert group.ended(0, notice_s + LINGER_S + MARGIN_S) == LOST_EXIT_CODE
        assert group.ended(1, MARGIN_S) == LOST_EXIT_CODE
        assert time.monotonic() - gone_s < notice_s + LINGER_S + MARGIN_S
        assert "host 2 is gone" in group.log(0)
        assert "the leader" in group.log(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "notice_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, DEAD_S)], ids=["kill", "stop"]
)
def test_followers_end_without_their_leader(
    folder: Path, number: signal.Signals, notice_s: float
) -> None:
    with group_of(folder, 3, FLAGS) as group:
        group.signal(0, number)
        for who in (1, 2):
            assert group.ended(who, notice_s + MARGIN_S) == LOST_EXIT_CODE, group.logs()
            assert "the connection to the leader ended" in group.log(who)


@pytest.mark.slow
def test_a_sigterm_to_all_ends_them_in_order(folder: Path) -> None:
    """And until then a follower has pages of its own, as a pod of a job needs them."""
    port = two_free_ports()
    own = {1: (f"--metrics_port={port}", f"--probe_listen=127.0.0.1:{port + 1}")}
    with group_of(folder, 3, (*FLAGS, "--interrupted_exit_code=75"), own_flags=own) as group:
        run_against(group.address, PLAN, shape=SHAPE)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            shown = page.read().decode()
        received = re.search(
            r'^prestage_worker_put_bytes_total\{plane="hosts"\} (\S+)$', shown, re.MULTILINE
        )
        assert received is not None and float(received[1]) > 0, shown
        assert "prestage_worker_progress_age_seconds" in shown
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/readyz", timeout=5) as ready:
            assert ready.status == 200
        for who in (1, 2, 0):
            group.signal(who, signal.SIGTERM)
        for who in range(3):
            assert group.ended(who, MARGIN_S) == 75, group.logs()
        assert "CRITICAL" not in group.logs()
        for who in (1, 2):
            assert "received" in group.log(who) and "in 9 parts" in group.log(who)


@pytest.mark.slow
def test_r18_a_host_that_cannot_load_ends_the_start_at_once(folder: Path) -> None:
    """Other flags than the leader's are refused by name; then the others need not wait."""
    with group_of(folder, 2, FLAGS, own_flags={1: ("--timed_update_s=7",)}, wait_s=0) as group:
        assert group.ended(1, 20.0) == 2
        assert "--timed_update_s=7.0, the leader with --timed_update_s=0.0" in group.log(1)
        assert group.processes[0].poll() is None, "a stranger does not end the group"
        assert "--timed_update_s" in group.log(0)


@pytest.mark.slow
def test_hosts_that_never_meet_end_with_an_error(folder: Path) -> None:
    with group_of(
        folder,
        1,
        (
            *FLAGS,
            "--num_processes=2",
            "--process_id=0",
            "--coordinator_address=127.0.0.1:45123",
            "--hosts_join_s=1",
        ),
        wait_s=0,
    ) as alone:
        assert alone.ended(0, 20.0) == LOST_EXIT_CODE
        assert "processes [1] of 2 did not join within 1 s" in alone.log(0)


@pytest.mark.slow
def test_the_job_index_says_which_host_this_is(folder: Path) -> None:
    """As a JobSet's pods are started: the same flags for all."""
    environment = {"JOB_COMPLETION_INDEX": "1"}
    with group_of(
        folder,
        1,
        (*FLAGS, "--num_processes=2", "--coordinator_address=127.0.0.1:45133", "--hosts_join_s=1"),
        environment=environment,
        wait_s=0,
    ) as follower:
        assert follower.ended(0, 20.0) == 2
        assert "no leader answered at 127.0.0.1:45134 within 1 s" in follower.log(0)
    assert "JOB_COMPLETION_INDEX" not in os.environ
