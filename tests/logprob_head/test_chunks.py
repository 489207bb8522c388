"""Cutting tokens into chunks and joining them again loses and invents nothing."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_worker.logprob_head.chunks import Chunks


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 2), tokens=st.integers(1, 9), chunk_tokens=st.integers(1, 11))
def test_join_undoes_split(rows: int, tokens: int, chunk_tokens: int) -> None:
    x = np.arange(1, 1 + rows * tokens * 2, dtype=np.float32).reshape(rows, tokens, 2)
    chunks = Chunks.fit(tokens, chunk_tokens)
    parts = chunks.split(x)
    assert parts.shape == (chunks.steps, rows, chunks.chunk_tokens, 2)
    assert chunks.chunk_tokens == min(tokens, chunk_tokens)
    assert chunks.steps * chunks.chunk_tokens - tokens in range(chunks.chunk_tokens)
    assert np.array_equal(chunks.join(parts), x)
    assert np.sum(parts) == np.sum(x)  # what pads the last chunk is zero
