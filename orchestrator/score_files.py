"""Old log-probs of a rollout batch, kept until its last step: in a folder, so that a new process can
go on in the middle of a batch whose first weights are gone. Files only; no protocol, no pickle.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

KEPT_BATCHES: Final = 8
"""Newest batches whose files stay: more than any kept checkpoint goes back."""


class ScoresUnusable(Exception):
    """The kept values are not there or not this run's; says why."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """Of one micro-batch."""

    digest: str  # Of the micro-batch without the values: they are of no other.
    logprobs: npt.NDArray[np.float32]  # [rows, tokens], nats, 0 where nothing is trained.


@dataclass(frozen=True, kw_only=True)
class BatchScores:
    """Of one rollout batch, by (mini-batch, index)."""

    number: int
    train_step: int  # Policy version of the weights that scored.
    values: Mapping[tuple[int, int], Values]


class ScoreFiles:
    """One file a batch. `folder` None keeps nothing: only this process can go on then."""

    def __init__(self, folder: Path | None, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id

    def _path(self, number: int) -> Path | None:
        return None if self._folder is None else self._folder / f"batch-{number:08d}.npz"

    def keep(self, scores: BatchScores) -> None:
        """Write durably, before a step trains on them. Older batches' files go. Raises `OSError`."""
        path = self._path(scores.number)
        if path is None or self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "run_id": np.array(self._run_id),
            "train_step": np.array(scores.train_step, np.int64),
        }
        for (part, index), values in scores.values.items():
            arrays[f"logprobs/{part}/{index}"] = values.logprobs
            arrays[f"digest/{part}/{index}"] = np.array(values.digest)
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        for old in sorted(self._folder.glob("batch-*.npz"))[:-KEPT_BATCHES]:
            with contextlib.suppress(FileNotFoundError):
                old.unlink()

    def load(self, number: int) -> BatchScores:
        """Raises `ScoresUnusable`."""
        path = self._path(number)
        if path is None:
            raise ScoresUnusable("no folder keeps them")
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            run_id, train_step = str(arrays["run_id"]), int(arrays["train_step"])
            values = {
                _place(name): Values(
                    digest=str(arrays[name.replace("logprobs/", "digest/")]), logprobs=array
                )
                for name, array in arrays.items()
                if name.startswith("logprobs/")
            }
        except FileNotFoundError as error:
            raise ScoresUnusable(f"{path} is not there") from error
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ScoresUnusable(f"{path} cannot be read ({error})") from error
        if run_id != self._run_id:
            raise ScoresUnusable(f"{path} is of run {run_id!r}, not {self._run_id!r}")
        return BatchScores(number=number, train_step=train_step, values=values)


def _place(name: str) -> tuple[int, int]:
    _, part, index = name.split("/")
    return int(part), int(index)
