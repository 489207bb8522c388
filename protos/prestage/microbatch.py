"""Micro-batches as both sides see them: the field table, identities and the value itself.

Arrays are token-aligned: entry `[r, t]` belongs to token `t` of row `r`. The trainer shifts once
(position `t` predicts token `t + 1`). Imports NumPy only; knows no wire format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One packed field. Every field is `[rows, tokens, *trailing]` in C order."""

    name: str
    dtype: np.dtype[np.generic]
    required: bool
    trailing_dims: int  # Extra axes after [rows, tokens]; routed_experts has 2.
    pad_value: int  # What padding holds.
    meaning: str


def _field(
    name: str,
    dtype: type[np.generic],
    required: bool,
    meaning: str,
    trailing: int = 0,
    pad: int = 0,
) -> FieldSpec:
    return FieldSpec(
        name=name,
        dtype=np.dtype(dtype),
        required=required,
        trailing_dims=trailing,
        pad_value=pad,
        meaning=meaning,
    )


FIELDS: Final[Mapping[str, FieldSpec]] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _field("tokens", np.int32, True, "token ids, 0 at padding"),
            _field("segment_ids", np.int32, True, "1-based within a row, 0 = padding"),
            _field("positions", np.int32, True, "restart at 0 in each segment, 0 at padding"),
            _field("loss_mask", np.uint8, True, "1 = this token is trained; 0 on each first token"),
            _field("advantages", np.float32, True, "advantage of each token, 0 at padding"),
            _field("sampling_logprobs", np.float32, False, "the rollout's log-prob in nats"),
            _field("old_logprobs", np.float32, False, "trainer-computed old log-prob in nats"),
            _field("ref_logprobs", np.float32, False, "reference model's log-prob in nats"),
            _field(
                "routed_experts",
                np.int16,
                False,
                "[rows, tokens, moe_layers, top_k] expert ids, -1 = use the model's own router",
                trailing=2,
                pad=-1,
            ),
        )
    }
)


@dataclass(frozen=True, kw_only=True, order=True)
class MicroBatchId:
    """Names one micro-batch of one run. `step` and `index` count from 0."""

    run_id: str
    step: int
    index: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.step}/{self.index}"


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch.

    `arrays`: field name to array `[rows, tokens_per_row, ...]` as in `FIELDS`. Real content is a
    prefix: row `r` has `row_lengths[r]` real tokens; padding rows (length 0) come last.
    """

    id: MicroBatchId
    rows: int
    tokens_per_row: int
    row_lengths: tuple[int, ...]
    arrays: Mapping[str, Array]
    digest: str = ""  # Content digest, hex; "" until computed.

    @property
    def trained_tokens(self) -> int:
        """Number of tokens whose loss mask is set."""
        return int(np.count_nonzero(self.arrays["loss_mask"]))

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(self.row_lengths)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all padded arrays together."""
        return sum(array.nbytes for array in self.arrays.values())
