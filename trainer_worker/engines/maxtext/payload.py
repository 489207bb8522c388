"""A micro-batch in the fields of Tunix's `RLTrainerPayload`, as its packed assembler fills them.

A packed row is all completion: the prompt part has width 0, and `completion_mask` is the loss mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prestage.microbatch import MicroBatch

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class RLPayload:
    """B rows of T tokens. Names and meanings as in Tunix; what a run does not have is None.

    The arrays are the micro-batch's own: a trainer that keeps them beyond its call must copy.
    """

    prompt_ids: Array  # int32 [B, 0]
    prompt_mask: Array  # int32 [B, 0]
    completion_ids: Array  # int32 [B, T]
    completion_mask: Array  # int32 [B, T], 1 = this token is trained.
    advantages: Array  # float32 [B, T]
    segment_ids: Array  # int32 [B, T], 0 = padding.
    segment_positions: Array  # int32 [B, T], from 0 in each segment.
    num_segments: int  # The most of any row.
    old_per_token_logps: Array | None = (
        None  # float32 [B, T], nats; the sampler's or the trainer's.
    )
    ref_per_token_logps: Array | None = None  # float32 [B, T], nats.
    sampler_is_weights: Array | None = None  # Needs this pass's log-probs: the loss computes it.
    routed_experts: Array | None = None  # int16 [B, T, moe_layers, top_k], -1 = unset.


def rl_payload(batch: MicroBatch) -> RLPayload:
    """The micro-batch's arrays under Tunix's names. Copies only the mask (uint8 to int32)."""
    arrays = batch.arrays
    empty = np.zeros((batch.rows, 0), np.int32)
    segments = arrays["segment_ids"]
    return RLPayload(
        prompt_ids=empty,
        prompt_mask=empty,
        completion_ids=arrays["tokens"],
        completion_mask=arrays["loss_mask"].astype(np.int32),
        advantages=arrays["advantages"],
        segment_ids=segments,
        segment_positions=arrays["positions"],
        num_segments=int(segments.max(initial=0)),
        old_per_token_logps=arrays.get("old_logprobs", arrays.get("sampling_logprobs")),
        ref_per_token_logps=arrays.get("ref_logprobs"),
        routed_experts=arrays.get("routed_experts"),
    )
