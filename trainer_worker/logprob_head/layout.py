"""Where tokens and head parameters lie on a mesh, as one value that specs and collectives share.

Every tuple of axes here is passed both to a PartitionSpec and to the collective that undoes it, in
the same order: a gather follows the order it is given, not the mesh's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from trainer_worker.logprob_head.config import HeadConfig


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """Why a sharded head cannot run here; `reason` completes "using the chunked head: "."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """[R, T] tokens on a mesh.

    row_axes, token_axes: axes of the mesh that split rows and tokens, major first; may be empty.
    row_ranks, token_ranks: into how many parts.
    local_rows, local_tokens: what one device holds.
    """

    row_axes: tuple[str, ...]
    token_axes: tuple[str, ...]
    row_ranks: int
    token_ranks: int
    local_rows: int
    local_tokens: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes over which a head parameter is sharded: rows major, so that the devices which share
        a row hold neighbouring parts."""
        return (*self.row_axes, *self.token_axes)

    @property
    def devices(self) -> int:
        """Devices that hold different tokens."""
        return self.row_ranks * self.token_ranks

    @property
    def tokens(self) -> PartitionSpec:
        """Spec of a [R, T] or [R, T, ...] array."""
        return _spec(self.row_axes, self.token_axes)

    def parameter(self, shape: Sequence[int]) -> PartitionSpec | None:
        """Spec of a head parameter, split over all devices; None when no dimension divides."""
        dimension = self.split_dimension(shape)
        if dimension is None:
            return None
        return _spec(*[()] * dimension, self.axes)

    def split_dimension(self, shape: Sequence[int]) -> int | None:
        """The last dimension of `shape` that the device count divides: features before vocabulary,
        so that the vocab-parallel head can hand vocabulary rows over within a row's devices."""
        for dimension in reversed(range(len(shape))):
            if shape[dimension] % self.devices == 0:
                return dimension
        return None


def fit_layout(
    mesh: AbstractMesh | Mesh, config: HeadConfig, *, rows: int, tokens: int
) -> Layout | Misfit:
    """The layout of [rows, tokens] that config's axes give on this mesh, or why there is none.

    Axes that the mesh lacks are left out; axes that the mesh has beyond them must have size 1.
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    row_axes = tuple(axis for axis in config.row_axes if axis in sizes)
    token_axes = tuple(axis for axis in config.token_axes if axis in sizes)
    spare = [a for a, n in sizes.items() if n > 1 and a not in (*row_axes, *token_axes)]
    if spare:
        return Misfit(
            reason=f"no token layout fits the mesh: axis {spare[0]!r} has size {sizes[spare[0]]} and"
            f" holds neither rows {config.row_axes} nor tokens {config.token_axes}"
        )
    if not (row_axes or token_axes):
        return Misfit(
            reason=f"no token layout fits the mesh: its axes {mesh.axis_names} hold neither rows"
            f" {config.row_axes} nor tokens {config.token_axes}"
        )
    row_ranks = math.prod(sizes[axis] for axis in row_axes)
    token_ranks = math.prod(sizes[axis] for axis in token_axes)
    if rows % row_ranks:
        return Misfit(
            reason=f"no token layout fits the mesh: {rows} rows do not divide over {row_ranks}"
            f" devices of {row_axes}"
        )
    if tokens % token_ranks:
        return Misfit(
            reason=f"no token layout fits the mesh: {tokens} tokens do not divide over"
            f" {token_ranks} devices of {token_axes}"
        )
    return Layout(
        row_axes=row_axes,
        token_axes=token_axes,
        row_ranks=row_ranks,
        token_ranks=token_ranks,
        local_rows=rows // row_ranks,
        local_tokens=tokens // token_ranks,
    )


def head_param_spec(
    shape: Sequence[int], mesh: AbstractMesh | Mesh, config: HeadConfig
) -> PartitionSpec:
    """How to store a head parameter (table [V, D] or norm scale [D]) so that no head has to move it
    before its one gather, nor its gradient after its one reduction.

    Replicated where no dimension divides by the device count (the chunked head then runs).
    """
    layout = fit_layout(mesh, config, rows=0, tokens=0)
    spec = None if isinstance(layout, Misfit) else layout.parameter(shape)
    return _spec() if spec is None else spec


def token_spec(mesh: AbstractMesh | Mesh, config: HeadConfig) -> PartitionSpec:
    """How hidden [R, T, D] and targets [R, T] are best placed; replicated where no layout fits."""
    layout = fit_layout(mesh, config, rows=0, tokens=0)
    return _spec() if isinstance(layout, Misfit) else layout.tokens


def gather(x: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
    """The whole of `dimension`, from parts split over `axes` (major first), on each device."""
    return jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x


def reduce(x: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
    """The inverse of `gather` for gradients: sums over `axes` and keeps the device's own part."""
    if not axes:
        return x
    scattered: jax.Array = jax.lax.psum_scatter(  # type: ignore[no-untyped-call]
        x, axes, scatter_dimension=dimension, tiled=True
    )
    return scattered


def swap(x: jax.Array, axes: tuple[str, ...], *, split: int, join: int) -> jax.Array:
    """Splits dimension `split` over `axes` and joins what the others held along `join`."""
    swapped: jax.Array = jax.lax.all_to_all(  # type: ignore[no-untyped-call]
        x, axes, split_axis=split, concat_axis=join, tiled=True
    )
    return swapped


def largest(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Elementwise maximum over `axes`, the same on each device of them."""
    peak: jax.Array = jax.lax.pmax(x, axes)  # type: ignore[no-untyped-call]
    return peak


def total(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Elementwise sum over `axes`, the same on each device of them."""
    summed: jax.Array = jax.lax.psum(x, axes)  # type: ignore[no-untyped-call]
    return summed


def varying(x: jax.Array, layout: Layout) -> jax.Array:
    """`x` typed as different on each device, as a scan's zero carry must be."""
    return jax.lax.pcast(x, layout.axes, to="varying") if layout.axes else x


def _spec(*parts: tuple[str, ...]) -> PartitionSpec:
    spec: PartitionSpec = PartitionSpec(  # type: ignore[no-untyped-call]
        *(part or None for part in parts)
    )
    return spec
