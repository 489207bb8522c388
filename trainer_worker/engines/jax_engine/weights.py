"""Weight export of the jax engine: pinned host copies by version, and safetensors files of them.

A version is one complete copy taken between two updates, so what is read of it is never mixed.
It may not touch the engine's state, nor read the device outside `prepare_weight_sync`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from trainer_worker.engine import EngineError, TensorInfo
from trainer_worker.engines.jax_engine.checkpoints import sha256_of, sync_path
from trainer_worker.engines.jax_engine.engine import JaxEngine, named_leaves
from trainer_worker.engines.jax_engine.processes import to_host
from trainer_worker.engines.jax_engine.values import failing_as


@dataclass(frozen=True, kw_only=True)
class _Pinned:
    tensors: Mapping[str, npt.NDArray[np.generic]]  # Read-only.
    manifest: tuple[TensorInfo, ...]


class JaxWeights:
    """See the module. `prepare_weight_sync` runs on the device thread, the rest on any."""

    def __init__(self, engine: JaxEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._pinned: dict[int, _Pinned] = {}

    def prepare_weight_sync(self, memory_budget_bytes: int) -> int:
        """Waits for the update that made the version; later updates wait for nothing here.

        Pinning a version again is a no-op. Raises `MemoryError` before anything is copied, and
        `EngineError` when the version's weights changed (a restore) since it was pinned.
        """
        version = self._engine.train_step
        leaves = named_leaves(self._engine.state.params)
        need = sum(leaf.nbytes for leaf in leaves.values())
        if need > memory_budget_bytes:
            raise MemoryError(
                f"pinning version {version} takes {need} bytes; the budget is {memory_budget_bytes}"
            )
        with failing_as(None):
            copies = {name: to_host(leaf) for name, leaf in leaves.items()}
        for copy in copies.values():
            copy.setflags(write=False)
        manifest = tuple(
            TensorInfo(name=name, dtype=str(a.dtype), shape=a.shape, digest=sha256_of(a))
            for name, a in sorted(copies.items())
        )
        with self._lock:
            held = self._pinned.get(version)
            if held is not None and held.manifest != manifest:
                raise EngineError(
                    f"version {version} is pinned with other weights: release it before it is"
                    " pinned again"
                )
            if held is None:
                self._pinned[version] = _Pinned(tensors=copies, manifest=manifest)
        return need

    def _version(self, version: int) -> _Pinned:
        with self._lock:
            if version not in self._pinned:
                raise EngineError(
                    f"version {version} is not pinned; pinned: {sorted(self._pinned)}"
                )
            return self._pinned[version]

    def export_manifest(self, version: int) -> tuple[TensorInfo, ...]:
        """By name. Digests are SHA-256 of the bytes in C order. Raises `EngineError`."""
        return self._version(version).manifest

    def export_tensor(self, version: int, name: str) -> npt.NDArray[np.generic]:
        """Read-only; stays valid after a release. Raises `EngineError`."""
        tensors = self._version(version).tensors
        if name not in tensors:
            raise EngineError(f"no parameter {name!r}; there are {', '.join(sorted(tensors))}")
        return tensors[name]

    def release_weight_sync(self, version: int) -> None:
        with self._lock:
            self._pinned.pop(version, None)

    def write_safetensors(self, folder: Path, version: int) -> Path:
        """`folder/weights-VERSION.safetensors`, whole or not at all. Raises `OSError`."""
        tensors = self._version(version).tensors
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"weights-{version}.safetensors"
        partial = folder / f".partial-{target.name}"
        try:
            save_file(dict(tensors), partial, metadata={"version": str(version)})
        except SafetensorError as error:
            partial.unlink(missing_ok=True)
            raise OSError(f"{target} could not be written: {error}") from error
        sync_path(partial)
        partial.replace(target)
        sync_path(folder)
        return target
