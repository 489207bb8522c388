"""JaxEngine: the training and scoring ports on a mesh of devices of a JAX backend.

Every call dispatches and returns; what it must wait for is said where it waits. Inputs are copied
into private host arrays before they are handed to JAX, because JAX on CPU may alias a NumPy buffer
for as long as the array lives.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import jax
import numpy as np
from jax import Array

from prestage.microbatch import FIELDS, MicroBatch
from prestage.wire.errors import InvalidTensor
from prestage.wire.layout import ShardRange
from prestage.wire.validate import check_values
from trainer_worker.engine import (
    CompileReport,
    CompileSpec,
    EngineCapabilities,
    EngineError,
    InvalidBatch,
    PreparedInput,
    ScoreResult,
    UpdateResult,
)
from trainer_worker.engines.jax_engine.compiles import compile_count
from trainer_worker.engines.jax_engine.config import EngineConfig
from trainer_worker.engines.jax_engine.loss import host_denominator, segment_limit
from trainer_worker.engines.jax_engine.mesh import Placement
from trainer_worker.engines.jax_engine.model import HostParams, Params
from trainer_worker.engines.jax_engine.processes import host_copy, many, part_of, to_host
from trainer_worker.engines.jax_engine.programs import (
    DENOMINATOR,
    EVALUATE_SUMS,
    LOSS,
    MARKER,
    Programs,
    State,
    Sums,
    compile_programs,
    field_shape,
    first_state,
    score_fields,
)
from trainer_worker.engines.jax_engine.values import (
    DispatchedBatch,
    DispatchedUpdate,
    DropAudit,
    Prepared,
    StepNumbers,
    failing_as,
    read,
)

IDLE_WAITS: Final = 5
USABLE_FIELDS: Final = ("sampling_logprobs", "old_logprobs", "ref_logprobs")
ROUTING: Final = "routed_experts"

log = logging.getLogger(__name__)

_next = jax.jit(lambda marker: marker + 1)


class JaxEngine:
    """See the module. Made with its initial parameters on the host."""

    def __init__(
        self,
        config: EngineConfig,
        params: HostParams,
        *,
        can_checkpoint: bool = False,
        can_export_weights: bool = False,
    ) -> None:
        self._can_checkpoint, self._can_export_weights = can_checkpoint, can_export_weights
        shape = config.mesh
        self._place = Placement.of(shape)
        self._device: jax.Device = self._place.mesh.devices.flat[0]
        if config.skips_prompts is None:
            one = shape.devices == 1 and self._device.platform != "gpu"
            config = replace(config, skips_prompts=one and config.head_mode == "off")
        self._config = config
        host = jax.tree.map(lambda p: np.asarray(p, np.float32), params)
        on_device: Params = self._place.put(host, self._place.tree(host))
        # One program, so that no two leaves share a buffer: each of them is donated later.
        first = jax.eval_shape(lambda p: first_state(config, p), on_device)
        self._state: State = jax.jit(
            lambda p: first_state(config, p), out_shardings=self._place.tree(first)
        )(on_device)
        self._sums: Sums | None = None
        self._programs: Programs | None = None
        self._spec: CompileSpec | None = None
        self._train_step = 0
        self._denominator = 0.0
        self._micro_batches = 0
        self._inflight: deque[DispatchedBatch] = deque()
        # With MoE buffers that may overflow: what is not known yet to have fitted.
        self._unsettled: deque[tuple[Prepared, DispatchedBatch]] = deque()
        self._audit = DropAudit()
        self._warned = False
        self._zero = jax.device_put(np.zeros(len(MARKER), np.float32), self._place.replicated)

    # -- what it is ---------------------------------------------------------------------------

    @property
    def capabilities(self) -> EngineCapabilities:
        moe = self._config.model.moe
        return EngineCapabilities(
            engine="jax",
            can_stage=True,
            can_defer_update=True,
            can_checkpoint=self._can_checkpoint,
            can_export_weights=self._can_export_weights,
            can_score=True,
            update_waits_for_device=bool(self._config.loss.logp_gate) or self._config.may_drop,
            reports_drop_audit=True,
            optional_fields=self._usable_fields,
            required_fields=self._config.loss.required_fields,
            vocab_size=self._config.model.vocab_size,
            moe_layers=self._config.model.moe_layers,
            top_k=0 if moe is None else moe.top_k,
            num_experts=0 if moe is None else moe.num_experts,
            device_kind=self._device.device_kind,
            device_count=self._place.mesh.size,
            row_multiple=self._config.mesh.row_ranks,
        )

    @property
    def _usable_fields(self) -> tuple[str, ...]:
        return USABLE_FIELDS if self._config.model.moe is None else (*USABLE_FIELDS, ROUTING)

    @property
    def train_step(self) -> int:
        return self._train_step

    @property
    def backend_compiles(self) -> int:
        return compile_count()

    @property
    def state(self) -> State:
        """Parameters and optimizer state on the device (checkpoints, exports, tests)."""
        return self._state

    @property
    def open_micro_batches(self) -> int:
        """Micro-batches that the open step has accumulated."""
        return self._micro_batches

    @property
    def sums(self) -> Sums | None:
        """What the open step added up so far, on the device (audits, tests)."""
        return self._sums

    # -- bring-up -------------------------------------------------------------------------------

    def compile(self, spec: CompileSpec) -> CompileReport:
        """Compile every program and run each once, with empty input: nothing is lazy in a step.

        Raises `EngineError` while a step is open, and for fields that the loss lacks.
        """
        started_s, before = time.monotonic(), compile_count()
        if self._micro_batches:
            raise EngineError("compile while a step is open: close or abort it first")
        self._check_fields(f"compile for {spec.rows} x {spec.tokens_per_row}", spec.fields)
        if self._programs is None or spec != self._spec:
            self._check_split(spec)
            self._programs = compile_programs(self._config, self._state, spec)
            self._spec = spec
            self._warm_up(self._programs, spec)
        self._idle_wait_s()  # Compiles, and so does not count.
        if many():
            host_copy(self._state)  # Compiles what a later one needs.
        self.wait_for_device()
        waits = tuple(self._idle_wait_s() for _ in range(IDLE_WAITS))
        return CompileReport(
            seconds=time.monotonic() - started_s,
            programs=compile_count() - before,
            idle_wait_seconds=waits,
        )

    def _check_split(self, spec: CompileSpec) -> None:
        mesh = self._config.mesh
        for what, value, ranks, axes in (
            ("rows", spec.rows, mesh.row_ranks, "--mesh_fsdp x --mesh_expert"),
            ("tokens_per_row", spec.tokens_per_row, mesh.context, "--mesh_context"),
        ):
            if value % ranks:
                raise InvalidBatch(
                    f"compile: {what} is {value}, which {ranks} devices ({axes}) cannot share out:"
                    f" use a multiple of {ranks}"
                )

    def _idle_wait_s(self) -> float:
        """What the wait for a micro-batch takes where there is nothing to compute, s.

        The same wait as a staged boundary's is judged by: on a result that was not read before.
        """
        started_s = time.monotonic()
        read(_next(self._zero), None)
        return time.monotonic() - started_s

    def _warm_up(self, programs: Programs, spec: CompileSpec) -> None:
        """Run each executable once. The denominator is 0, so that no parameter changes."""
        part = self.input_part(spec, jax.process_index())
        shape = (part.row_count, part.token_count)
        empty = {
            name: np.full(
                (*shape, *field_shape(self._config, spec, name)[2:]),
                FIELDS[name].pad_value,
                FIELDS[name].dtype,
            )
            for name in spec.fields
        }
        batch = self._to_device(empty, spec.fields)
        self._sums, _ = programs.fwd_bwd(self._state.params, programs.zero(), batch)
        if programs.dropless is not None:
            self._sums, _ = programs.dropless(self._state.params, self._sums, batch)
        self._state, self._sums, metrics, _ = programs.update(self._state, self._sums)
        fields = score_fields(spec.fields)
        scored = programs.score(self._state.params, self._to_device(empty, fields))
        evaluated = self._to_device(empty, (*fields, "loss_mask"))
        sums = programs.evaluate(self._state.params, evaluated)
        jax.block_until_ready((scored, sums, metrics))

    def _check_fields(self, what: str, fields: Iterable[str]) -> None:
        fields = set(fields)
        wanted = {name for name, field in FIELDS.items() if field.required}
        wanted |= set(self._config.loss.required_fields)
        if missing := sorted(wanted - fields):
            raise InvalidBatch(
                f"{what}: the field {missing[0]!r} is missing, which the loss needs"
                f" (old_logprobs {self._config.loss.old_logprobs})"
            )
        if extra := sorted(fields - wanted - set(self._usable_fields)):
            raise InvalidBatch(f"{what}: this engine cannot use the field {extra[0]!r}")

    def _ready(self) -> tuple[Programs, CompileSpec]:
        if self._programs is None or self._spec is None:
            raise EngineError("the engine is not compiled: call compile first")
        return self._programs, self._spec

    def check(self, batch: MicroBatch) -> None:
        name, spec = f"micro-batch {batch.id}", self._spec
        self._check_shape(batch)
        if spec is not None and sorted(batch.arrays) != sorted(spec.fields):
            raise InvalidBatch(
                f"{name} has the fields {sorted(batch.arrays)}; the engine is compiled for"
                f" {sorted(spec.fields)}"
            )
        self._check_fields(name, batch.arrays)
        self._check_content(batch)

    def _check_shape(self, batch: MicroBatch) -> None:
        spec = self._spec
        if spec is None or (batch.rows, batch.tokens_per_row) == (spec.rows, spec.tokens_per_row):
            return
        raise InvalidBatch(
            f"micro-batch {batch.id} is [{batch.rows}, {batch.tokens_per_row}]; the engine is"
            f" compiled for [{spec.rows}, {spec.tokens_per_row}]: pack for that shape or compile"
            " again"
        )

    def _check_content(self, batch: MicroBatch) -> None:
        name = f"micro-batch {batch.id}"
        try:
            check_values(
                batch,
                vocab_size=self._config.model.vocab_size,
                num_experts=self.capabilities.num_experts,
            )
        except InvalidTensor as error:
            raise InvalidBatch(str(error)) from error
        if ROUTING in batch.arrays:
            self._check_routing(name, batch.arrays[ROUTING])
        segments, limit = batch.arrays["segment_ids"], segment_limit(batch.tokens_per_row)
        if segments.size and int(segments.max()) > limit:
            row, token = (int(x) for x in np.argwhere(np.greater(segments, limit))[0])
            raise InvalidBatch(
                f"{name}: field segment_ids holds {segments[row, token]} at row {row}, position"
                f" {token}; number the segments of a row from 1 (at most {limit})"
            )
        _check_rows(name, batch)

    def _check_routing(self, name: str, routing: np.ndarray) -> None:
        """Its ids are in range already."""
        able = self.capabilities
        if routing.shape[2:] != (able.moe_layers, able.top_k):
            raise InvalidBatch(
                f"{name}: field {ROUTING} has {routing.shape[2]} layers of {routing.shape[3]}"
                f" experts; the model has {able.moe_layers} layers with experts (dense layers do not"
                f" count) of {able.top_k}"
            )
        for row in range(routing.shape[0]):  # Temporary memory does not grow with the payload.
            unset = (routing[row] < 0).sum(axis=-1)
            partly = (unset > 0) & (unset < able.top_k)
            if partly.any():
                token, layer = (int(x) for x in np.argwhere(partly)[0])
                raise InvalidBatch(
                    f"{name}: field {ROUTING} holds {routing[row, token, layer].tolist()} at row"
                    f" {row}, position {token}, MoE layer {layer}: give every expert of a token, or"
                    " -1 for all of them"
                )

    def input_bytes(self, batch: MicroBatch) -> int:
        return batch.payload_bytes

    # -- the step -------------------------------------------------------------------------------

    def prepare_fwd_bwd_input(self, batch: MicroBatch) -> Prepared:
        return self.prepare_part(batch, self.denominator(batch))

    def denominator(self, batch: MicroBatch) -> float:
        """What a whole micro-batch adds to the step's, as the host knows it."""
        return host_denominator(self._config.loss, batch.arrays)

    def input_part(self, spec: CompileSpec, process: int) -> ShardRange:
        """The part of each micro-batch that a process holds. Raises `InvalidBatch`."""
        self._check_split(spec)
        return part_of(self._place.inputs, (spec.rows, spec.tokens_per_row), process)

    def prepare_part(self, part: MicroBatch, denominator: float) -> Prepared:
        """`part`: this process's rows and tokens; `denominator`: of the whole micro-batch."""
        with failing_as(part.id):
            arrays = self._to_device(part.arrays, part.arrays)
        return Prepared(
            batch_id=part.id,
            digest=part.digest,
            device_bytes=part.payload_bytes,
            arrays=arrays,
            denominator=denominator,
        )

    def _to_device(
        self, arrays: Mapping[str, np.ndarray], fields: Iterable[str]
    ) -> dict[str, Array]:
        """Start copying private copies of `fields`; the caller may reuse its arrays at once.

        `arrays`: of this process's part of a micro-batch.
        """
        _, spec = self._ready()
        shape = (spec.rows, spec.tokens_per_row)
        return {
            name: self._place.place(name, arrays[name], (*shape, *arrays[name].shape[2:]))
            for name in fields
        }

    def fwd_bwd(self, prepared: PreparedInput) -> DispatchedBatch:
        """Waits for the oldest micro-batch while `max_inflight` are in flight.

        One whose MoE buffers overflowed is run again before the next is dispatched, once it is that
        old: when, depends on the order of calls alone, so that sums are made in the same order in
        every run.
        """
        if not isinstance(prepared, Prepared):
            raise EngineError(f"fwd_bwd got {type(prepared).__name__}, not this engine's input")
        programs, _ = self._ready()
        if len(self._unsettled) >= self._config.max_inflight:
            self._settle_oldest()
        dispatched = self._dispatch(programs.fwd_bwd, prepared)
        if self._config.may_drop:
            self._unsettled.append((prepared, dispatched))
        self._denominator += prepared.denominator
        self._micro_batches += 1
        return dispatched

    def _dispatch(self, program: jax.stages.Compiled, prepared: Prepared) -> DispatchedBatch:
        programs, _ = self._ready()
        while len(self._inflight) >= self._config.max_inflight:
            self._inflight.popleft().wait()
        with failing_as(prepared.batch_id):
            sums = programs.zero() if self._sums is None else self._sums
            self._sums, marker = program(self._state.params, sums, dict(prepared.arrays))
        dispatched = DispatchedBatch(batch_id=prepared.batch_id, marker=marker)
        self._inflight.append(dispatched)
        return dispatched

    def _settle_oldest(self) -> None:
        """Learn whether the oldest micro-batch overflowed; if so, run it again without drops.

        Its first pass added nothing to the sums then, so nothing has to be taken out of them.
        """
        programs, _ = self._ready()
        prepared, dispatched = self._unsettled.popleft()
        count = dispatched.dropped()
        if not count:
            return
        again = programs.dropless is not None
        if not self._warned:
            self._warned = True
            log.warning(
                "micro-batch %s: its MoE buffers (--ragged_buffer_factor=%g) had no room for %d"
                " assignments; %s. Said once; counted every step.",
                prepared.batch_id,
                self._config.ragged_buffer_factor,
                count,
                "it is run again without drops"
                if again
                else "they are left out of the gradient (no --retry_when_tokens_dropped)",
            )
        self._audit = DropAudit(
            dropped_assignments=self._audit.dropped_assignments + count,
            dropless_replays=self._audit.dropless_replays + int(again),
            dropped_assignments_used=self._audit.dropped_assignments_used + (0 if again else count),
        )
        if programs.dropless is not None:
            self._dispatch(programs.dropless, prepared)

    def _settle(self) -> None:
        """Afterwards the open step's sums are complete and its audit is known."""
        if not self._unsettled:
            return
        step = self._unsettled[-1][0].batch_id.step
        while self._unsettled:
            self._settle_oldest()
        if self._audit.dropless_replays:
            while self._inflight:  # A retry that fails must name its micro-batch.
                self._inflight.popleft().wait()
        log.info(
            "MOE_DROP_AUDIT_STEP step=%d dropped_assignments_used=%d dropless_replays=%d",
            step,
            self._audit.dropped_assignments_used,
            self._audit.dropless_replays,
        )

    def wait_for_device(self) -> float:
        started_s = time.monotonic()
        while self._inflight:
            self._inflight.popleft().wait()
        with failing_as(None):
            jax.block_until_ready((self._state, self._sums))
        return time.monotonic() - started_s

    def update(self) -> UpdateResult:
        """Waits for the device only with log-prob gates, which decide there what is kept, and with
        MoE buffers that may overflow: what did is run again first.

        Raises `EngineError` when no micro-batch was accumulated.
        """
        programs, spec = self._ready()
        self._settle()
        sums, audit = self._sums, self._audit
        if sums is None or not self._micro_batches:
            raise EngineError("update without a micro-batch: nothing was accumulated")
        denominator = self._denominator
        if self._config.loss.logp_gate:
            totals = read(sums.totals, None)
            if not np.isfinite(totals[LOSS]):
                raise EngineError(f"the step's loss is {totals[LOSS]}: abort the step")
            denominator = float(totals[DENOMINATOR])
        with failing_as(None):
            self._state, self._sums, update, step_totals = programs.update(self._state, sums)
        applied = denominator > 0
        self._train_step += int(applied)
        metrics = StepNumbers(
            totals=step_totals,
            update=update,
            micro_batches=self._micro_batches,
            has_sampler="sampling_logprobs" in spec.fields,
            audit=None if self._config.model.moe is None else audit,
        )
        self._denominator, self._micro_batches, self._audit = 0.0, 0, DropAudit()
        return UpdateResult(
            applied=applied,
            completion=DispatchedUpdate(update=update),
            metrics=metrics,
            dropless_replays=audit.dropless_replays,
            dropped_assignments=audit.dropped_assignments_used if applied else 0,
        )

    def abort_step(self) -> None:
        """Made of nothing that the aborted step computed: it may have failed."""
        self._sums = None
        self._inflight.clear()
        self._unsettled.clear()
        self._denominator, self._micro_batches, self._audit = 0.0, 0, DropAudit()

    def restore_state(self, state: State, train_step: int) -> None:
        """Take over host arrays as the state, copied; the open step and its input are dropped."""
        with failing_as(None):
            # Copied: the buffers are donated to the next update, the host arrays are not ours.
            self._state = self._place.put(state, self._place.tree(state))
            jax.block_until_ready(self._state)
        self.abort_step()
        self._train_step = train_step

    # -- scoring --------------------------------------------------------------------------------

    def check_scored(self, batch: MicroBatch) -> None:
        """What is only scored needs no field of the loss. Raises `InvalidBatch`."""
        self._check_shape(batch)
        self._check_content(batch)

    def _scored(self, batch: MicroBatch, *more: str) -> dict[str, Array]:
        """What scoring reads, on the device. Without routing every token uses its own router."""
        _, spec = self._ready()
        arrays, wanted = dict(batch.arrays), score_fields(spec.fields)
        for name in set(wanted) - set(arrays):
            trailing = field_shape(self._config, spec, name)[2:]
            arrays[name] = np.full(
                (*arrays["tokens"].shape, *trailing), FIELDS[name].pad_value, FIELDS[name].dtype
            )
        return self._to_device(arrays, (*wanted, *more))

    def compute_logprobs(self, batch: MicroBatch) -> ScoreResult:
        self._ready()
        self.check_scored(batch)
        return self.compute_logprobs_part(batch)

    def compute_logprobs_part(self, batch: MicroBatch) -> ScoreResult:
        """Of the whole micro-batch, given this process's part of it."""
        programs, _ = self._ready()
        with failing_as(batch.id):
            arrays = self._scored(batch)
            scored = programs.score(self._state.params, arrays)
        return ScoreResult(logprobs=read(scored, batch.id), metrics={})

    def evaluate(self, batch: MicroBatch) -> Mapping[str, float]:
        """Means over trained tokens, nats: `logprob`, `entropy`; and their number, `tokens`."""
        self._ready()
        self.check_scored(batch)
        return self.evaluate_part(batch)

    def evaluate_part(self, batch: MicroBatch) -> Mapping[str, float]:
        """Of the whole micro-batch, given this process's part of it."""
        programs, _ = self._ready()
        with failing_as(batch.id):
            arrays = self._scored(batch, "loss_mask")
            sums = read(programs.evaluate(self._state.params, arrays), batch.id)
        values = dict(zip(EVALUATE_SUMS, map(float, sums), strict=True))
        tokens = max(values["tokens"], 1.0)
        return values | {name: values[name] / tokens for name in ("logprob", "entropy")}

    # -- parameters -----------------------------------------------------------------------------

    def parameter_digest(self) -> str:
        whole = hashlib.sha256()
        for name, leaf in sorted(named_leaves(self._state.params).items()):
            with failing_as(None):
                array = to_host(leaf)
            whole.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
            whole.update(array.data)
        return whole.hexdigest()

    def close(self) -> None:
        self._inflight.clear()
        jax.block_until_ready(self._state)


def _check_rows(name: str, batch: MicroBatch) -> None:
    """Segments of a whole row lie one after another and count their positions from 0.

    An id used for two trajectories would let one attend to the other, and a row that starts within
    a segment has a token that nothing predicts. Raises `InvalidBatch`.
    """
    for row in range(batch.rows):  # Row by row: temporary memory does not grow with the payload.
        segments, positions = (
            batch.arrays[field][row].astype(np.int64) for field in ("segment_ids", "positions")
        )
        real = segments != 0
        goes_on = np.zeros(segments.shape, np.bool_)
        goes_on[1:] = segments[1:] == segments[:-1]
        wanted = np.zeros(positions.shape, np.int64)
        wanted[1:] = positions[:-1] + 1
        wrong = real & (positions != np.where(goes_on, wanted, 0))
        if wrong.any():
            token = int(np.argmax(wrong))
            raise InvalidBatch(
                f"{name}: field positions holds {positions[token]} at row {row}, position {token}:"
                " positions count from 0 within each segment"
            )
        starts = segments[real & ~goes_on]
        if (np.diff(starts) <= 0).any():
            again = int(starts[1:][np.diff(starts) <= 0][0])
            token = int(np.flatnonzero(real & ~goes_on)[1:][np.diff(starts) <= 0][0])
            raise InvalidBatch(
                f"{name}: field segment_ids holds {again} at row {row}, position {token}, after a"
                " higher or the same id: number the segments of a row in order, each once"
            )


def named_leaves(params: Params) -> dict[str, Array]:
    """Parameters by their path, such as `layers/wq`."""
    found: dict[str, Array] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": leaf for inner, leaf in value.items()}
        else:
            found[name] = value
    return found
