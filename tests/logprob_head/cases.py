"""Micro-batches for the heads, run by any copy of the package (the real one or a broken one)."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from math import prod
from types import ModuleType
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from tests.logprob_head.reference import Outcome, reference
from trainer_worker.logprob_head.hlo_count import Program


@dataclass(frozen=True, kw_only=True)
class Case:
    """One micro-batch on one mesh. `mesh` lists (axis, size) in the mesh's own order."""

    mode: str = "local"
    mesh: tuple[tuple[str, int], ...] = (("fsdp", 2), ("context", 2), ("expert", 2))
    rows: int = 4
    tokens: int = 48
    features: int = 16
    vocab: int = 40
    chunk_tokens: int = 10
    temperature: float = 1.0
    final_softcap: float | None = None
    norm: bool = False
    dtype: str = "float32"
    row_axes: tuple[str, ...] = ("fsdp", "expert")
    token_axes: tuple[str, ...] = ("context",)
    seed: int = 0

    def replace(self, **changes: object) -> "Case":
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def make_mesh(self) -> Mesh:
        sizes = [size for _, size in self.mesh]
        devices = np.array(jax.devices()[: prod(sizes)]).reshape(sizes)
        return Mesh(devices, [axis for axis, _ in self.mesh])


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Inputs in the case's dtype; a, b are the cotangents of log-probs and entropies."""

    hidden: NDArray[np.floating]
    table: NDArray[np.floating]
    norm_scale: NDArray[np.floating] | None
    targets: NDArray[np.int32]
    a: NDArray[np.float32]
    b: NDArray[np.float32]


class Compiled(Protocol):
    """As much of a compiled jax program as these tests use."""

    def as_text(self) -> str: ...


def sample(case: Case) -> Sample:
    """Random inputs whose logits have standard deviation 2; a fifth of the tokens at the end of each row weighs nothing."""
    rng = np.random.default_rng(case.seed)
    shape = (case.rows, case.tokens)
    live = np.arange(case.tokens) < case.tokens * 0.8
    dtype = jnp.dtype(case.dtype)
    scale = rng.uniform(0.5, 1.5, case.features).astype(dtype) if case.norm else None
    return Sample(
        hidden=rng.normal(size=(*shape, case.features)).astype(dtype),
        table=(rng.normal(size=(case.vocab, case.features)) * (2 / case.features**0.5)).astype(
            dtype
        ),
        norm_scale=scale,
        targets=rng.integers(0, case.vocab, shape, dtype=np.int32),
        a=(rng.normal(size=shape) * live).astype(np.float32),
        b=(rng.normal(size=shape) * live).astype(np.float32),
    )


class Run:
    """One head, compiled for one case: forward with gradients, or forward alone."""

    def __init__(self, head: ModuleType, case: Case, *, gradients: bool = True) -> None:
        self.case, self._mesh = case, case.make_mesh()
        config = head.HeadConfig(
            chunk_tokens=case.chunk_tokens,
            temperature=case.temperature,
            final_softcap=case.final_softcap,
            mode=case.mode,
            compute_dtype=case.dtype,
            row_axes=case.row_axes,
            token_axes=case.token_axes,
        )

        def forward(params, targets, a, b):  # type: ignore[no-untyped-def]
            hidden, table, scale = params
            return head.token_logprobs(hidden, table, targets, config, norm_scale=scale)

        def objective(params, targets, a, b):  # type: ignore[no-untyped-def]
            scored = forward(params, targets, a, b)
            return jnp.sum(a * scored.logprobs + b * scored.entropy), scored

        tokens = head.token_spec(self._mesh, config)
        like = sample(case)
        specs = (
            tokens,
            head.head_param_spec(like.table.shape, self._mesh, config),
            None
            if like.norm_scale is None
            else head.head_param_spec(like.norm_scale.shape, self._mesh, config),
        )
        self._shardings = jax.tree.map(
            lambda spec: NamedSharding(self._mesh, spec),
            (specs, tokens, tokens, tokens),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        fn = jax.value_and_grad(objective, has_aux=True) if gradients else forward
        out = ((None, None), self._shardings[0]) if gradients else None
        with jax.set_mesh(self._mesh):
            jitted = jax.jit(fn, in_shardings=self._shardings, out_shardings=out)
            self.compiled = jitted.lower(*self._arguments(like)).compile()

    @staticmethod
    def _arguments(s: Sample):  # type: ignore[no-untyped-def]
        return ((s.hidden, s.table, s.norm_scale), s.targets, s.a, s.b)

    def program(self) -> Program:
        return Program(self.compiled.as_text())

    def temp_bytes(self) -> int:
        return int(self.compiled.memory_analysis().temp_size_in_bytes)

    def outcome(self, inputs: Sample | None = None) -> Outcome:
        """Runs the program on the case's sample, or on other inputs of the same shapes."""
        with jax.set_mesh(self._mesh):
            placed = jax.device_put(self._arguments(inputs or sample(self.case)), self._shardings)
            (_, scored), grads = jax.device_get(self.compiled(*placed))
        return Outcome(
            logprobs=scored.logprobs,
            entropy=scored.entropy,
            d_hidden=grads[0],
            d_table=grads[1],
            d_norm_scale=grads[2],
        )


@cache
def run(head: ModuleType, case: Case, *, gradients: bool = True) -> Run:
    """Compiled once per head and case."""
    return Run(head, case, gradients=gradients)


@cache
def outcome(head: ModuleType, case: Case) -> Outcome:
    return run(head, case).outcome()


@cache
def expected(case: Case) -> Outcome:
    """The float64 reference on the case's own (rounded) inputs."""
    return reference(
        **{f.name: getattr(sample(case), f.name) for f in dataclasses.fields(Sample)},
        temperature=case.temperature,
        final_softcap=case.final_softcap,
        norm_eps=1e-6,
    )


def leaf_error(got: NDArray[np.floating], want: NDArray[np.floating]) -> float:
    """Norm of the difference over the norm of the reference, of one leaf."""
    delta = got.astype(np.float64) - want
    return float(np.linalg.norm(delta) / np.linalg.norm(want))


def token_error(got: NDArray[np.floating], want: NDArray[np.floating]) -> float:
    """Largest norm of one token's (or one id's) difference, over the root mean square norm."""
    delta = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    return float(delta.max() / np.sqrt(np.mean(np.linalg.norm(want, axis=-1) ** 2)))
