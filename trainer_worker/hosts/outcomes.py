"""What a command came to, as one line of text that is the same on every host. Pure.

It holds what must be equal: versions, counts, digests. Times, memory and messages differ from host to
host and are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from trainer_worker.engine import PreparedInput, RunPosition, ScoreResult, TensorInfo, UpdateResult
from trainer_worker.hosts.chain import numbers_digest


def of_error(error: BaseException) -> str:
    return f"raised {type(error).__name__}"


def of_prepare(prepared: PreparedInput) -> str:
    return f"prepared {prepared.batch_id} {prepared.digest}"


def of_update(result: UpdateResult, train_step: int) -> str:
    return f"applied {result.applied} train_step {train_step} retries {result.dropless_replays}"


def of_position(position: RunPosition | None) -> str:
    if position is None:
        return "no checkpoint"
    return (
        f"checkpoint of {position.run_id} step {position.step} train_step {position.train_step}"
        f" cursor {position.data_cursor}"
    )


def of_scores(result: ScoreResult) -> str:
    logprobs = hashlib.blake2b(result.logprobs.tobytes(), digest_size=16)
    return f"log-probs {result.logprobs.shape} {logprobs.hexdigest()} {_numbers(result.metrics)}"


def of_numbers(values: Mapping[str, float]) -> str:
    return f"numbers {_numbers(values)}"


def of_weights(version: int, manifest: tuple[TensorInfo, ...]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for tensor in manifest:
        whole.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {tensor.digest}\n".encode())
    return f"version {version} {whole.hexdigest()}"


def _numbers(values: Mapping[str, float]) -> str:
    return numbers_digest(values).hex()
