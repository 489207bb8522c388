"""A scenario's worker as a real process behind gRPC; the caller is the real client.

Killed with SIGKILL. A save is waited for before a kill, so that a log does not depend on timing.
What it cannot do: make the engine raise at a given call (`can_play`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from orchestrator.bench.synthetic import SyntheticShape, make_batch
from orchestrator.calls import Done, Lost, Send
from orchestrator.trainer_client import RunShape, TrainerClient
from prestage.protocol import SEQUENCED_CALLS, Call
from prestage.wire.channel import open_channel
from prestage.wire.stream_plane import StreamSender
from tests.scenarios.play import Key, Reply
from tests.scenarios.script import Scenario
from tests.support.rig import FIELDS

START_SECONDS = 60.0
RUN = "scenario"


def can_play(scenario: Scenario) -> bool:
    return all(command.kind != "engine raises" for command in scenario.commands)


@dataclass
class ProcessBackend:
    """One worker process at a time, on a unix socket in `folder`."""

    scenario: Scenario
    folder: Path
    expected_digest: str = ""  # Parameters of an undisturbed run; empty: learn them.
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shape = SyntheticShape(micro_batches=self.scenario.micro_batches)
        self._saved_step = -1  # Steps in the newest checkpoint that was taken.
        self._start()
        self._client = self._new_client()

    # -- the process --------------------------------------------------------------------------------

    def _start(self) -> None:
        number = len(self.processes)
        ready = self.folder / f"ready-{number}"
        log = (self.folder / f"worker-{number}.log").open("wb")
        self._address = f"unix://{self.folder}/w{number}.sock"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "trainer_worker.main",
                "--engine=timed",
                "--timed_fwd_bwd_s=0.002",
                f"--listen={self._address}",
                f"--state_dir={self.folder}/state",
                f"--checkpoint_dir={self.folder}/checkpoints",
                f"--trace_dir={self.folder}/traces",
                f"--ready_file={ready}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        log.close()
        self.processes.append(process)
        deadline_s = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                text = (self.folder / f"worker-{number}.log").read_text()
                raise AssertionError(f"the worker did not start: {text[-2000:]}")
            time.sleep(0.01)
        self._channel: grpc.Channel = open_channel(self._address)

    def _new_client(self) -> TrainerClient:
        shape = RunShape(
            rows=self._shape.rows, tokens_per_row=self._shape.tokens_per_row, fields=FIELDS
        )
        return TrainerClient(self._channel, run_id=RUN, shape=shape)

    def stop(self) -> None:
        self._channel.close()
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
            process.wait(timeout=START_SECONDS)

    # -- Backend --------------------------------------------------------------------------------------

    def put(self, step: int, index: int, key: Key) -> str:
        batch = make_batch(self._shape, RUN, step, index)
        StreamSender(self._channel).put(
            batch, epoch=key.epoch, incarnation=key.incarnation, timeout_s=START_SECONDS
        )
        return batch.digest

    def call(self, send: Send, key: Key, *, raises: bool = False) -> Reply:
        assert not raises
        client = self._client
        held = (client.incarnation, client.epoch)
        if send.call in SEQUENCED_CALLS or send.call is Call.GET_METRICS:
            client._incarnation, client._epoch = key.incarnation, key.epoch
        event = client.call(send, data_cursor="cursor").event
        if send.call is not Call.OPEN_RUN:
            client._incarnation, client._epoch = held
        assert not isinstance(event, Lost), f"{send.line}: {event.why}"
        if send.call is Call.SAVE_CHECKPOINT and isinstance(event, Done):
            self._saved_step = send.step + 1
        if isinstance(event, Done):  # A log does not depend on measured times.
            return replace(event, stage_seconds=-1.0, device_wait_seconds=-1.0)
        return event

    def crash(self) -> None:
        if self._saved_step >= 0:
            self._wait_until_durable()
        self.processes[-1].kill()
        self.processes[-1].wait(timeout=START_SECONDS)
        self._channel.close()
        self._start()
        held = (self._client.incarnation, self._client.epoch)
        self._client = self._new_client()
        self._client._incarnation, self._client._epoch = held

    def _wait_until_durable(self) -> None:
        deadline_s = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline_s:
            event = self._client.call(Send(call=Call.GET_STATE), data_cursor="").event
            assert isinstance(event, Done) and event.view is not None
            if event.view.durable_step >= self._saved_step:
                return
            time.sleep(0.005)
        raise AssertionError("the checkpoint did not become durable")

    def new_caller(self) -> None:
        self._client = self._new_client()

    def parameters_are_right(self, num_steps: int, micro_batches: int) -> bool:
        del num_steps, micro_batches
        return self._client.parameter_digest() == self.expected_digest

    def broken(self) -> list[str]:
        return []
