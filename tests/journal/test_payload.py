"""Trajectories come back from bytes as they were, or not at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.journal.errors import JournalDamaged
from orchestrator.journal.log import _record
from orchestrator.journal.payload import decode, encode
from orchestrator.trajectory import Trajectory
from tests.journal.rig import rollout

PRESENT = st.booleans()


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    prompt, completion = draw(st.integers(0, 5)), draw(st.integers(0, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def floats(present: bool) -> np.ndarray | None:
        return rng.normal(size=completion).astype(np.float32) if present else None

    routing = rng.integers(-1, 512, (prompt + completion, 2, 3), dtype=np.int16)
    return Trajectory(
        group_id=draw(st.text(min_size=1, max_size=8)),
        index=draw(st.integers(0, 2**31)),
        prompt_tokens=rng.integers(0, 1000, prompt, dtype=np.int32),
        completion_tokens=rng.integers(0, 1000, completion, dtype=np.int32),
        sampling_logprobs=floats(draw(PRESENT)),
        old_logprobs=floats(draw(PRESENT)),
        ref_logprobs=floats(draw(PRESENT)),
        routed_experts=routing if draw(PRESENT) else None,
        loss_mask=rng.integers(0, 2, prompt + completion, dtype=np.uint8)
        if draw(PRESENT)
        else None,
        reward=draw(st.floats(allow_nan=False)),
        policy_version=draw(st.integers(0, 2**40)),
        finish_reason=draw(st.text(max_size=4)),
        task=draw(st.text(max_size=4)),
        truncated_tokens=draw(st.integers(0, 9)),
    )


@given(trajectory=trajectories())
def test_what_comes_back_is_what_went_in(trajectory):
    encoded = encode(trajectory)
    payload = b"".join(encoded.buffers)
    assert len(payload) == encoded.payload_bytes
    record = replace(_record(trajectory, encoded), payload_bytes=len(payload))
    back = decode(payload, record, "file")
    assert back.same_content(trajectory)
    assert (back.finish_reason, back.task, back.truncated_tokens) == (
        trajectory.finish_reason,
        trajectory.task,
        trajectory.truncated_tokens,
    )
    assert record.total_tokens == trajectory.total_tokens
    assert record.trainable_tokens == trajectory.trainable_tokens
    assert encode(back).digest == encoded.digest


@given(at=st.integers(0), bit=st.integers(0, 7))
def test_one_flipped_bit_is_told(at, bit):
    encoded = encode(rollout("g", 1))
    payload = bytearray(b"".join(encoded.buffers))
    record = replace(_record(rollout("g", 1), encoded), payload_bytes=len(payload))
    payload[at % len(payload)] ^= 1 << bit
    with pytest.raises(JournalDamaged, match=r"file: group 'g' index 1 .* not what was ack"):
        decode(bytes(payload), record, "file")
    with pytest.raises(JournalDamaged):
        decode(bytes(payload[:-1]), record, "file")


def test_other_content_has_another_digest():
    first = rollout("g", 0)
    digest = encode(first).digest
    assert encode(replace(first, reward=first.reward + 1)).digest != digest
    assert encode(replace(first, policy_version=1)).digest != digest
    tokens = first.completion_tokens.copy()
    tokens[-1] ^= 1
    assert encode(replace(first, completion_tokens=tokens)).digest != digest
