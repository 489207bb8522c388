"""The jax engine as one of several processes: their start, each one's part of the input, whole arrays.

Every process runs the same programs in the same order on arrays that span all of them; what differs is
which part of a micro-batch it is given. Whole arrays on the host need all processes at once.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import jax
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from prestage.microbatch import MicroBatch
from prestage.wire.channel import is_local
from prestage.wire.layout import ShardRange
from trainer_worker.engine import CompileSpec, InvalidBatch, PreparedInput, ScoreResult
from trainer_worker.engines.jax_engine.config import EngineConfigInvalid
from trainer_worker.engines.jax_engine.programs import State
from trainer_worker.engines.processes import Processes

if TYPE_CHECKING:
    from trainer_worker.engines.jax_engine.engine import JaxEngine

log = logging.getLogger(__name__)

SHUTDOWN_S: Final = 20


def start(processes: Processes) -> None:
    """Meet the other processes; blocks until all are there. Before any other use of JAX.

    Raises `EngineConfigInvalid` when they do not meet.
    """
    # Its handler would take SIGTERM away from us.
    jax.config.update("jax_enable_preemption_service", False)
    address = processes.coordinator_address
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=processes.num_processes,
            process_id=processes.process_id,
            cluster_detection_method="deactivate",
            # By default it listens on every address of the host.
            coordinator_bind_address=address if is_local(address) else None,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        raise EngineConfigInvalid(
            f"--coordinator_address={address}: the {processes.num_processes} processes did not"
            f" meet: {error}"
        ) from error
    cached = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if cached and jax.default_backend() == "cpu":
        # Seen with jax 0.10.2: with programs from the cache, processes on CPU wait for ever.
        log.warning("several processes on CPU do not use JAX's compilation cache: it is off")
        jax.config.update("jax_enable_compilation_cache", False)


def many() -> bool:
    return int(jax.process_count()) > 1


def part_of(sharding: NamedSharding, shape: tuple[int, int], process: int) -> ShardRange:
    """Rows and tokens of a `[rows, tokens]` array that the devices of a process hold.

    Raises `InvalidBatch` when they are not one block.
    """
    indices = {
        (_bounds(rows, shape[0]), _bounds(tokens, shape[1]))
        for device, (rows, tokens) in sharding.devices_indices_map(shape).items()
        if device.process_index == process  # type: ignore[attr-defined]
    }
    rows = sorted({row for row, _ in indices})
    tokens = sorted({token for _, token in indices})
    whole = len(indices) == len(rows) * len(tokens)
    if not (whole and _touch(rows) and _touch(tokens)):
        raise InvalidBatch(
            f"the devices of process {process} hold rows {rows} and tokens {tokens}, which is not"
            " one block: order the mesh axes so that the first ones count processes, fsdp before"
            " expert"
        )
    return ShardRange(
        row_start=rows[0][0],
        row_count=rows[-1][1] - rows[0][0],
        token_start=tokens[0][0],
        token_count=tokens[-1][1] - tokens[0][0],
    )


def _bounds(part: slice, size: int) -> tuple[int, int]:
    start, stop, _ = part.indices(size)
    return start, stop


def _touch(bounds: list[tuple[int, int]]) -> bool:
    return all(before[1] == after[0] for before, after in itertools.pairwise(bounds))


def _same(x: Array) -> Array:
    return x


def to_host(leaf: Array) -> npt.NDArray[np.generic]:
    """A copy of the whole array. All processes call it together, in the same order."""
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.array(leaf, copy=True, order="C")
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return np.array(jax.jit(_same, out_shardings=everywhere)(leaf), copy=True, order="C")


def named_state(state: State) -> dict[str, Array]:
    """Every leaf of the state by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}


def host_copy(state: State) -> dict[str, npt.NDArray[np.generic]]:
    """Every leaf by its path, copied: later updates donate the buffers. Waits for the device."""
    return {name: to_host(leaf) for name, leaf in named_state(state).items()}


class JaxShards:
    """`ShardedInputs` of a jax engine."""

    def __init__(self, engine: JaxEngine) -> None:
        self._engine = engine

    @property
    def process_id(self) -> int:
        return jax.process_index()

    def input_shards(self, spec: CompileSpec) -> tuple[ShardRange, ...]:
        return tuple(self._engine.input_part(spec, who) for who in range(jax.process_count()))

    def denominator(self, batch: MicroBatch) -> float:
        return self._engine.denominator(batch)

    def check_scored(self, batch: MicroBatch) -> None:
        self._engine.check_scored(batch)

    def prepare_shard(self, shard: MicroBatch, denominator: float) -> PreparedInput:
        return self._engine.prepare_part(shard, denominator)

    def compute_logprobs_shard(self, shard: MicroBatch) -> ScoreResult:
        return self._engine.compute_logprobs_part(shard)

    def evaluate_shard(self, shard: MicroBatch) -> Mapping[str, float]:
        return self._engine.evaluate_part(shard)
