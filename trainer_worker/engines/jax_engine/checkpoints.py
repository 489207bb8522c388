"""Checkpoints of the jax engine: one folder a step, trusted only with its completeness marker.

Safetensors and a manifest rather than orbax-checkpoint: orbax 0.12 does not fsync what its save
path writes from Python (its only fsync is in deletion metadata), its write boundaries cannot be
interrupted by a test, and it brings nine packages; the state is a flat list of whole arrays. Several
processes take the snapshot together, one of them writes it, and each reads the folder at a restore.

    step-7/state.safetensors   parameters and optimizer state, bit for bit
    step-7/manifest.json       position, and the dtype, shape and SHA-256 of every tensor
    step-7/COMPLETE            SHA-256 of the manifest: written last, before the folder is renamed
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import jax
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from trainer_worker.engine import EngineError, RunPosition
from trainer_worker.engines.jax_engine.engine import JaxEngine
from trainer_worker.engines.jax_engine.processes import host_copy, named_state
from trainer_worker.engines.jax_engine.programs import State
from trainer_worker.engines.jax_engine.values import failing_as

log = logging.getLogger(__name__)

TENSORS: Final = "state.safetensors"
MANIFEST: Final = "manifest.json"
MARKER: Final = "COMPLETE"
FORMAT: Final = 1
_STEP: Final = re.compile(r"step-(\d+)")
_LEFTOVERS: Final = (".partial-", ".deleted-")

HostTensors = Mapping[str, npt.NDArray[np.generic]]
FaultHook = Callable[[str, Path], None]


def no_fault(boundary: str, path: Path) -> None:
    """The hook outside tests: called after each write, with its name and what was written."""
    del boundary, path


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One tensor of a manifest."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a complete checkpoint holds."""

    position: RunPosition
    tensors: Mapping[str, TensorRecord]
    tensors_bytes: int  # Size of the tensor file.

    def text(self) -> str:
        record = {"format": FORMAT, **asdict(self)}
        return json.dumps(record, sort_keys=True, indent=1) + "\n"

    @staticmethod
    def parse(text: str) -> Manifest:
        """Raises `ValueError`, `KeyError` or `TypeError` for what `text` did not write."""
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise ValueError(f"format is {record['format']}, this reads {FORMAT}")
        return Manifest(
            position=RunPosition(**record["position"]),
            tensors={
                name: TensorRecord(
                    dtype=tensor["dtype"], shape=tuple(tensor["shape"]), sha256=tensor["sha256"]
                )
                for name, tensor in record["tensors"].items()
            },
            tensors_bytes=int(record["tensors_bytes"]),
        )


def sha256_of(array: npt.NDArray[np.generic]) -> str:
    """SHA-256 of the array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.sha256(flat.data).hexdigest()


def sync_path(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class JaxCheckpoints:
    """See the module. `begin_save` and `restore` run on the device thread."""

    def __init__(
        self, engine: JaxEngine, folder: Path, *, keep: int = 2, fault: FaultHook = no_fault
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; keep at least 1 checkpoint")
        self._engine = engine
        self._folder = folder
        self._keep = keep
        self._fault = fault

    def begin_save(self, position: RunPosition) -> JaxSave:
        """Copies the state to the host (waits for the step's update) and returns.

        Raises `EngineError` while a step is open and for a position of another policy version.
        """
        if self._engine.open_micro_batches:
            raise EngineError(
                f"checkpoint of step {position.step} while a step is open: close or abort it first"
            )
        if position.train_step != self._engine.train_step:
            raise EngineError(
                f"checkpoint of step {position.step}: its train_step is {position.train_step}, the"
                f" engine's is {self._engine.train_step}"
            )
        with failing_as(None):
            tensors = host_copy(self._engine.state)
        return JaxSave(store=self, position=position, tensors=tensors)

    def durable_step(self) -> int | None:
        complete = self._complete()
        return max(complete) if complete else None

    def saved_run(self, step: int | None) -> str | None:
        """Of the manifest alone."""
        complete = self._complete()
        chosen = step if step is not None else max(complete, default=-1)
        return complete[chosen].position.run_id if chosen in complete else None

    def restore(self, step: int | None) -> RunPosition | None:
        """Raises `EngineError`, before anything changed, for a checkpoint that does not fit.

        A complete checkpoint whose bytes changed is an error, not a reason to take an older one.
        """
        complete = self._complete()
        chosen = step if step is not None else max(complete, default=-1)
        if chosen not in complete:
            return None
        manifest, path = complete[chosen], self._folder / f"step-{chosen}" / TENSORS
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"checkpoint {path} cannot be read: {error}") from error
        state = self._fit(path, manifest, tensors)
        self._engine.restore_state(state, manifest.position.train_step)
        return manifest.position

    def _fit(self, path: Path, manifest: Manifest, tensors: HostTensors) -> State:
        wanted = named_state(self._engine.state)
        if odd := sorted(set(wanted) ^ set(tensors)) or sorted(set(wanted) ^ set(manifest.tensors)):
            raise EngineError(
                f"checkpoint {path}: {odd[0]!r} is in only one of the checkpoint and the engine:"
                " start the worker with the model and optimizer that made it"
            )
        for name, leaf in wanted.items():
            held = tensors[name]
            if held.dtype != leaf.dtype or held.shape != leaf.shape:
                raise EngineError(
                    f"checkpoint {path}: {name} is {held.dtype}{list(held.shape)}, the engine's is"
                    f" {leaf.dtype}{list(leaf.shape)}: start the worker with the model that made it"
                )
            if sha256_of(held) != manifest.tensors[name].sha256:
                raise EngineError(
                    f"checkpoint {path}: the bytes of {name} are not those that were written:"
                    " restore another step, or remove this one's folder"
                )
        updates = int(tensors["updates"])
        if updates != manifest.position.train_step:
            raise EngineError(
                f"checkpoint {path}: {updates} updates, but train_step"
                f" {manifest.position.train_step}"
            )
        structure = jax.tree.structure(self._engine.state)
        state: State = jax.tree.unflatten(structure, [tensors[name] for name in wanted])
        return state

    # -- on disk, any thread ----------------------------------------------------------------------

    def _complete(self) -> dict[int, Manifest]:
        """Checkpoints to be trusted, by step. Says what it does not trust."""
        found: dict[int, Manifest] = {}
        if not self._folder.is_dir():
            return found
        for path in self._folder.iterdir():
            if (match := _STEP.fullmatch(path.name)) is None:
                continue
            try:
                found[int(match[1])] = _read_complete(path, int(match[1]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("checkpoint %s is not complete and is not used: %s", path, error)
        return found

    def _write(self, position: RunPosition, tensors: HostTensors) -> None:
        records = {
            name: TensorRecord(dtype=str(a.dtype), shape=a.shape, sha256=sha256_of(a))
            for name, a in tensors.items()
        }
        committed = self._complete().get(position.step)
        if committed is not None:
            _verify_same(self._folder, committed, position, records)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            if left.name.startswith(_LEFTOVERS):
                shutil.rmtree(left)
        target = self._folder / f"step-{position.step}"
        partial = self._folder / f".partial-{target.name}"
        try:
            self._fill(partial, position, tensors, records)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)  # A full disk gets its space back.
            raise
        if target.exists():  # Not complete, or it would have been verified above.
            self._remove(target)
        partial.rename(target)
        self._fault("renamed", target)
        sync_path(self._folder)
        self._fault("folder synced", target)
        self._retire(position.step)

    def _fill(
        self,
        partial: Path,
        position: RunPosition,
        tensors: HostTensors,
        records: Mapping[str, TensorRecord],
    ) -> None:
        partial.mkdir()
        self._fault("folder", partial)
        data = partial / TENSORS
        try:
            save_file(dict(tensors), data)
        except SafetensorError as error:  # The package's own type for a failed write.
            raise OSError(f"{data} could not be written: {error}") from error
        self._fault("tensors", data)
        sync_path(data)
        self._fault("tensors synced", data)
        manifest = Manifest(
            position=position, tensors=records, tensors_bytes=data.stat().st_size
        ).text()
        self._text(partial / MANIFEST, manifest, "manifest")
        sync_path(partial)
        self._fault("contents synced", partial)
        digest = hashlib.sha256(manifest.encode()).hexdigest()
        self._text(partial / MARKER, digest, "marker")
        sync_path(partial)
        self._fault("complete", partial)

    def _text(self, path: Path, text: str, boundary: str) -> None:
        path.write_text(text)
        self._fault(boundary, path)
        sync_path(path)
        self._fault(f"{boundary} synced", path)

    def _retire(self, saved: int) -> None:
        """Only after `saved` is durable. Never removes `saved` itself."""
        others = sorted(set(self._complete()) - {saved}, reverse=True)
        for step in others[self._keep - 1 :]:
            self._remove(self._folder / f"step-{step}")

    def _remove(self, path: Path) -> None:
        """Renamed first, so that a folder that is half deleted is not a checkpoint."""
        deleted = path.with_name(f".deleted-{path.name}")
        path.rename(deleted)
        self._fault("retired", deleted)
        shutil.rmtree(deleted)
        self._fault("deleted", path)


@dataclass(frozen=True, kw_only=True)
class JaxSave:
    """A snapshot on the host, to be made durable by `wait`."""

    store: JaxCheckpoints
    position: RunPosition
    tensors: HostTensors

    @property
    def step(self) -> int:
        return self.position.step

    def wait(self) -> None:
        """Write it, fsync it, then retire older ones. Raises `OSError` and `EngineError`."""
        self.store._write(self.position, self.tensors)


def _read_complete(path: Path, step: int) -> Manifest:
    text = (path / MANIFEST).read_text()
    if (path / MARKER).read_text() != hashlib.sha256(text.encode()).hexdigest():
        raise ValueError("its marker does not fit its manifest")
    manifest = Manifest.parse(text)
    if manifest.position.step != step:
        raise ValueError(f"it holds step {manifest.position.step}")
    if (size := (path / TENSORS).stat().st_size) != manifest.tensors_bytes:
        raise ValueError(f"{TENSORS} has {size} bytes, not {manifest.tensors_bytes}")
    return manifest


def _verify_same(
    folder: Path, committed: Manifest, position: RunPosition, records: Mapping[str, TensorRecord]
) -> None:
    """A re-save of a committed step changes nothing. Epoch and seq are audit: they may differ."""
    held, again = committed.position, position
    differs = [name for name in records if committed.tensors.get(name) != records[name]]
    for name, old, new in (
        ("run_id", held.run_id, again.run_id),
        ("train_step", held.train_step, again.train_step),
        ("data_cursor", held.data_cursor, again.data_cursor),
    ):
        if old != new:
            differs.insert(0, f"{name} ({old!r}, now {new!r})")
    if differs:
        raise EngineError(
            f"step {position.step} is already committed in {folder} with another {differs[0]}:"
            " give each run a --checkpoint_dir of its own"
        )
