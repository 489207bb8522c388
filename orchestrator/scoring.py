"""Trainer-computed old log-probs (`--old_logprobs=trainer`): scores a rollout batch with the weights
of the step that opens it, and writes the values into every micro-batch that trains it.

A rollout batch may feed several steps (mini-batches, iterations): all of it is scored before the
first of them, and the later ones take the kept values. Scoring reads only, so it can be repeated:
the same weights give the same values. Decides nothing about the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from orchestrator.feeder import NotWanted, SourceError, StepFeed, StepSource
from orchestrator.score_files import BatchScores, ScoreFiles, ScoresUnusable, Values
from orchestrator.sources.batches import BatchShape
from prestage.microbatch import FIELDS, Array, MicroBatch, MicroBatchId
from prestage.wire.digest import batch_digest
from prestage.wire.layout import Layout, plan_layout
from prestage.wire.planes import SendBuffer

FIELD: Final = "old_logprobs"
_SCORED_WITH: Final = (
    *(name for name, field in FIELDS.items() if field.required),
    "routed_experts",  # With replay, what is trained is routed so too.
)

Wanted = Callable[[], bool]
"""Whether what is being made is still asked for."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One micro-batch's log-probs and the policy version of the weights that gave them."""

    values: npt.NDArray[np.float32]  # [rows, tokens], token-aligned, nats.
    train_step: int


class ScorePort(Protocol):
    """Asks the trainer for log-probs. Harmless to repeat."""

    def logprobs(self, batch: MicroBatch, wanted: Wanted) -> Scored:
        """Raises `NotWanted`, `WorkerRefused`, `SourceError`."""
        ...


def bare(batch: MicroBatch, step: int) -> MicroBatch:
    """What scoring needs of a micro-batch, named as the first of `step`.

    The first of a step always finds room in the worker's store, so scoring cannot be starved by
    what is stored for training; its digest tells it from the one that is trained.
    """
    arrays = {name: batch.arrays[name] for name in _SCORED_WITH if name in batch.arrays}
    identity = MicroBatchId(run_id=batch.id.run_id, step=step, index=0)
    made = replace(batch, id=identity, arrays=arrays, digest="")
    return replace(made, digest=batch_digest(made))


def fresh_memory(layout: Layout) -> SendBuffer:
    """For micro-batches that are packed to be scored: the scored ones get the sender's memory."""
    return SendBuffer(layout=layout, buffer=np.empty(layout.buffer_bytes, np.uint8), zeroed=False)


class TrainerScores:
    """The feeder's scoring hook. Used by the feeder's thread only."""

    def __init__(
        self,
        source: StepSource,
        port: ScorePort,
        batches: BatchShape,
        *,
        files: ScoreFiles,
        reserve: Callable[[Layout], SendBuffer],
    ) -> None:
        """`reserve` gives the memory that scored micro-batches are written into."""
        self._source = source
        self._port = port
        self._batches = batches
        self._files = files
        self._reserve = reserve
        self._scores: BatchScores | None = None

    def __call__(self, feed: StepFeed, wanted: Wanted) -> StepFeed:
        """The step's feed with old log-probs in it. Called when the step's weights are in place.

        Raises `NotWanted`, `WorkerRefused`, `SourceError`.
        """
        step = feed.summary.step
        number = self._batches.batch_of(step)
        if self._batches.opens_batch(step):
            self._scores = self._score(number, step, wanted)
            if self._batches.steps_per_batch > 1:
                self._files.keep(self._scores)
        elif self._scores is None or self._scores.number != number:
            self._scores = self._kept(number, step)
        part = step % self._batches.num_minibatches
        return StepFeed(
            summary=feed.summary,
            micro_batches=self._written(feed.micro_batches, self._scores, part),
        )

    def _kept(self, number: int, step: int) -> BatchScores:
        try:
            return self._files.load(number)
        except ScoresUnusable as error:
            opens = self._batches.first_step(number)
            raise SourceError(
                f"step {step} goes on with rollout batch {number}, whose old log-probs were computed"
                f" before step {opens} with weights that are gone, and {error}: give --scores_dir"
                f" from the start of a run, or go on from a checkpoint of step {opens}"
            ) from error

    def _score(self, number: int, opens: int, wanted: Wanted) -> BatchScores:
        """Score the whole rollout batch that step `opens` begins, one micro-batch at a time."""
        values: dict[tuple[int, int], Values] = {}
        version: int | None = None
        for part in range(self._batches.num_minibatches):
            feed = self._source.open_step(opens + part, wanted=wanted)
            if feed is None:
                if not wanted():
                    raise NotWanted(f"scores of rollout batch {number} are not wanted any more")
                raise SourceError(
                    f"rollout batch {number} ended at step {opens + part}, though step {opens} has"
                    " begun: a batch feeds its steps whole"
                )
            for batch in feed.micro_batches:
                if version is None:
                    # Pools are sized by what comes first: let that be what is trained.
                    self._reserve(_layout(batch))
                scored = self._port.logprobs(bare(batch, opens), wanted)
                version = scored.train_step if version is None else version
                if scored.train_step != version:
                    raise SourceError(
                        f"rollout batch {number} was scored by policy versions {version} and"
                        f" {scored.train_step}: something else updates this worker; give it one"
                        " orchestrator"
                    )
                values[part, batch.id.index] = Values(
                    digest=batch.digest, logprobs=_trained_only(batch, scored.values)
                )
        return BatchScores(number=number, train_step=version or 0, values=values)

    def _written(
        self, batches: Iterator[MicroBatch], scores: BatchScores, part: int
    ) -> Iterator[MicroBatch]:
        for batch in batches:
            kept = scores.values.get((part, batch.id.index))
            if kept is None or kept.digest != batch.digest:
                held = "none" if kept is None else f"one of digest {kept.digest}"
                raise SourceError(
                    f"micro-batch {batch.id} (digest {batch.digest}) was not scored; rollout batch"
                    f" {scores.number} has {held} in its place: its rollouts or its packing changed"
                    " since; go on with the settings that the run began with"
                )
            yield self._with_scores(batch, kept.logprobs)

    def _with_scores(self, batch: MicroBatch, logprobs: Array) -> MicroBatch:
        arrays: Mapping[str, Array] = self._reserve(_layout(batch)).arrays()
        for name, array in batch.arrays.items():
            arrays[name][...] = array
        arrays[FIELD][...] = logprobs
        scored = replace(batch, arrays=arrays, digest="")
        return replace(scored, digest=batch_digest(scored))


def _layout(batch: MicroBatch) -> Layout:
    """Of a micro-batch with old log-probs."""
    trailing = {name: array.shape[2:] for name, array in batch.arrays.items()}
    return plan_layout(
        rows=batch.rows,
        tokens_per_row=batch.tokens_per_row,
        row_lengths=batch.row_lengths,
        fields={**trailing, FIELD: ()},
    )


def _trained_only(batch: MicroBatch, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """0 where nothing is trained, as the field table says. Raises `SourceError`."""
    trained = np.equal(batch.arrays["loss_mask"], 1)
    if values.shape != trained.shape:
        raise SourceError(
            f"micro-batch {batch.id} is {list(trained.shape)}, its log-probs are"
            f" {list(values.shape)}: the trainer scored something else"
        )
    if not np.isfinite(values[trained]).all():
        row, token = (int(place[0]) for place in np.nonzero(trained & ~np.isfinite(values)))
        raise SourceError(
            f"micro-batch {batch.id}: the trainer's log-prob at row {row}, position {token} is"
            f" {values[row, token]}: its weights are not finite; go on from an earlier checkpoint"
        )
    return np.where(trained, values, np.float32(0))
