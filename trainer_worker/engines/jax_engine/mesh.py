"""The device mesh and where every array lies on it: the one place that knows shardings.

Rows of a micro-batch lie over `fsdp x expert`, tokens of a row over `context`. Parameters, optimizer
moments and gradient sums are split over `fsdp` (the vocabulary table and the final norm over all
devices, as the sharded log-prob heads want them; experts over `expert`). It holds no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer_worker.engines.jax_engine.config import MESH_AXES, EngineConfigInvalid, MeshShape
from trainer_worker.logprob_head import HeadConfig, head_param_spec

ROW_AXES: Final = ("fsdp", "expert")
TOKEN_AXES: Final = ("context",)
TOKENS: Final = PartitionSpec(ROW_AXES, TOKEN_AXES)  # [R, T, ...]
WHOLE: Final = PartitionSpec()

_HEAD: Final = ("embed", "head", "final_norm")
_EXPERT: Final = ("expert_gate", "expert_up", "expert_down")
_LAYOUT: Final = HeadConfig(chunk_tokens=1, row_axes=ROW_AXES, token_axes=TOKEN_AXES)

Tree = TypeVar("Tree")


def make_mesh(
    fsdp: int,
    context: int,
    expert: int,
    *,
    order: tuple[str, ...] = MESH_AXES,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of all devices (of every process), or of the first one when all sizes are 1.

    Raises `EngineConfigInvalid` when the sizes do not make up the number of devices.
    """
    shape = MeshShape(fsdp=fsdp, context=context, expert=expert, order=order)
    found = list(jax.devices()) if devices is None else list(devices)
    if shape.devices == 1 and jax.process_count() == 1:
        found = found[:1]
    if shape.devices != len(found):
        raise EngineConfigInvalid(
            f"--mesh_fsdp={fsdp} x --mesh_context={context} x --mesh_expert={expert} are"
            f" {shape.devices} devices, but there are {len(found)}: make the product {len(found)}"
        )
    sizes = tuple(shape.size(axis) for axis in order)
    return Mesh(np.asarray(found, dtype=object).reshape(sizes), order)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Shardings on one mesh, and host arrays put there."""

    mesh: Mesh

    @classmethod
    def of(cls, shape: MeshShape) -> Placement:
        """Raises `EngineConfigInvalid` where the devices are not as many as `shape` needs."""
        return cls(mesh=make_mesh(shape.fsdp, shape.context, shape.expert, order=shape.order))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, WHOLE)

    @property
    def inputs(self) -> NamedSharding:
        """Of every field of a micro-batch `[R, T, ...]`."""
        return NamedSharding(self.mesh, TOKENS)

    def tree(self, tree: Tree) -> Tree:
        """The same tree with a sharding for each leaf: of parameters, or of what mirrors them.

        A leaf is known by the last part of its path and its shape, so that optimizer moments and
        gradient sums lie where their parameter lies.
        """
        shardings: Tree = jax.tree_util.tree_map_with_path(
            lambda path, leaf: NamedSharding(self.mesh, self._spec(_name(path), np.shape(leaf))),
            tree,
        )
        return shardings

    def _spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        if name in _HEAD and shape:
            return head_param_spec(shape, self.mesh, _LAYOUT)
        parts: list[str | None] = [None] * len(shape)
        first = 1  # Dimension 0 counts layers.
        if name in _EXPERT:
            parts[1], first = "expert", 2
        for dimension in reversed(range(first, len(shape))):
            if shape[dimension] % self.mesh.shape["fsdp"] == 0:
                parts[dimension] = "fsdp"
                break
        return PartitionSpec(*parts)

    def place(
        self, name: str, local: npt.NDArray[np.generic], global_shape: tuple[int, ...] | None = None
    ) -> Array:
        """Start copying one field of a micro-batch; the caller may reuse `local` at once.

        `local`: this process's part, `[rows, tokens, ...]` (all of it, of a single process);
        `global_shape`: of the whole field, where that differs. Waits for no other process.
        """
        private = np.array(local)  # JAX on CPU may alias a NumPy buffer while the array lives.
        if self.mesh.size == 1:
            one: Array = jax.device_put(private, self.inputs)
            return one
        del name  # Every field lies alike today.
        shared: Array = jax.make_array_from_process_local_data(
            self.inputs, private, private.shape if global_shape is None else global_shape
        )
        return shared

    def put(self, tree: Tree, shardings: Tree) -> Tree:
        """Host arrays, whole and the same on every process, onto the mesh. Copied."""

        def one(leaf: npt.NDArray[np.generic], sharding: NamedSharding) -> Array:
            return jax.make_array_from_callback(
                np.shape(leaf), sharding, lambda index: np.array(leaf[index])
            )

        placed: Tree = jax.tree.map(one, tree, shardings)
        return placed


def _name(path: tuple[object, ...]) -> str:
    return jax.tree_util.keystr(path[-1:], simple=True)


def has_mesh() -> bool:
    """Whether the code being traced runs under `jax.set_mesh`."""
    return not jax.sharding.get_abstract_mesh().empty


def constrain(x: Array, spec: PartitionSpec) -> Array:
    """`x` laid out so, under a mesh; else `x`."""
    return lax.with_sharding_constraint(x, spec) if has_mesh() else x
