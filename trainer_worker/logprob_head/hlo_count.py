"""Counts collectives and matmul FLOPs in compiled HLO text, loops included.

A loop body counts as often as its trip count says; a loop without a known trip count is an error,
never "once". Both branches of a conditional count. Reads text only: needs no jax.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(
    r"(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "f64": 8,
}


class HloReadError(ValueError):
    """The text holds something that this reader would have to guess about."""


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.dims)

    @property
    def payload_bytes(self) -> int:
        return self.elements * _BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]
    rest: str

    def operands(self) -> list[str]:
        """Names inside the operand parentheses."""
        depth = 1
        for end, letter in enumerate(self.rest):
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if depth == 0:
                return _NAME.findall(self.rest[:end])
        raise HloReadError(f"{self.name}: operand list has no end")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One array moved by a collective: `times` per program run, `looped` when in any loop body.

    group: devices that take part with each other.
    """

    kind: str
    result: Array
    operand: Array
    group: int
    times: int
    looped: bool

    @property
    def elements(self) -> int:
        """The larger side: the whole array of a gather or of a reduction."""
        return max(self.result.elements, self.operand.elements)


class Program:
    """The computations of one HLO module, with how often each runs."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, dict[str, Instruction]] = {}
        entry = None
        current: dict[str, Instruction] | None = None
        for line in text.splitlines():
            line = re.sub(r"/\*.*?\*/", "", line)
            header = _HEADER.match(line)
            if header:
                current = self._computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
            elif line.startswith("}"):
                current = None
            elif current is not None:
                found = _INSTRUCTION.match(line)
                if found is None:
                    raise HloReadError(f"cannot read the instruction {line.strip()[:120]!r}")
                arrays = tuple(
                    Array(dtype=dtype, dims=tuple(int(d) for d in dims.split(",") if d))
                    for dtype, dims in _ARRAY.findall(found[2])
                )
                current[found[1]] = Instruction(
                    name=found[1], opcode=found[3], arrays=arrays, rest=found[4]
                )
        if entry is None:
            raise HloReadError("no ENTRY computation")
        self._runs: dict[str, list[tuple[int, bool]]] = {}
        self._walk(entry, times=1, looped=False)

    def _walk(self, computation: str, *, times: int, looped: bool) -> None:
        self._runs.setdefault(computation, []).append((times, looped))
        for instruction in self._computations[computation].values():
            for kind, names in _CALLS.findall(instruction.rest):
                inner, in_loop = times, looped
                if instruction.opcode == "while" and kind in ("body", "condition"):
                    trips = _TRIPS.search(instruction.rest)
                    if trips is None:
                        raise HloReadError(f"{instruction.name}: no known trip count")
                    inner, in_loop = times * int(trips[1]), True
                for name in _NAME.findall(names):
                    self._walk(name, times=inner, looped=in_loop)

    def instructions(self) -> Iterator[tuple[str, Instruction, int, bool]]:
        """(computation, instruction, times, in a loop) for every instruction that runs."""
        for computation, runs in self._runs.items():
            for times, looped in runs:
                for instruction in self._computations[computation].values():
                    yield computation, instruction, times, looped

    def collectives(self) -> list[Collective]:
        """Every array moved by a collective; an asynchronous pair counts at its start."""
        found = []
        for computation, instruction, times, looped in self.instructions():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            operands = [
                self._computations[computation][name].arrays[0] for name in instruction.operands()
            ]
            results = instruction.arrays[-len(operands) :]
            for operand, result in zip(operands, results, strict=True):
                found.append(
                    Collective(
                        kind=kind,
                        result=result,
                        operand=operand,
                        group=_group_size(instruction),
                        times=times,
                        looped=looped,
                    )
                )
        return found

    def matmul_flops(self) -> int:
        """Two per multiply-add of every dot, per device and program run."""
        flops = 0
        for computation, instruction, times, _ in self.instructions():
            if instruction.opcode == "custom-call" and re.search(
                r'custom_call_target="[^"]*(matmul|gemm|dot)', instruction.rest, re.IGNORECASE
            ):
                raise HloReadError(f"{instruction.name}: a matmul in a custom call is not counted")
            if instruction.opcode != "dot":
                continue
            left = self._computations[computation][instruction.operands()[0]].arrays[0]
            dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
            if dims is None:
                raise HloReadError(f"{instruction.name}: a dot without contracting dimensions")
            depth = prod(left.dims[int(d)] for d in dims[1].split(",") if d)
            flops += times * 2 * depth * instruction.arrays[0].elements
        return flops


def gathers(program: Program, elements: int) -> int:
    """How often a whole array of this many elements is gathered in one run."""
    return _count(program, ("all-gather",), elements)


def reductions(program: Program, elements: int) -> int:
    """How often an array of this many elements is summed over devices: reduce-scatters and
    all-reduces alike, as compilers write the first as the second with a slice."""
    return _count(program, ("reduce-scatter", "all-reduce"), elements)


def looped_collectives(program: Program) -> int:
    """Collectives inside any loop body, each counted once."""
    return sum(moved.looped for moved in program.collectives())


def received_bytes(program: Program) -> float:
    """Bytes that one device receives in one run, by ring collectives (permutes not counted)."""
    total = 0.0
    for moved in program.collectives():
        whole = max(moved.result.payload_bytes, moved.operand.payload_bytes)
        others = (moved.group - 1) / moved.group
        passes = {"all-reduce": 2, "collective-permute": 0}.get(moved.kind, 1)
        total += moved.times * passes * whole * others
    return total


def _group_size(instruction: Instruction) -> int:
    """Devices of one replica group, in any of the three notations XLA prints."""
    text = instruction.rest
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text):
        return int(iota[1])
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes[2]))
    if instruction.opcode.startswith("collective-permute"):
        return 2
    raise HloReadError(f"{instruction.name}: cannot read its replica groups")


def _count(program: Program, kinds: tuple[str, ...], elements: int) -> int:
    return sum(
        moved.times
        for moved in program.collectives()
        if moved.kind in kinds and moved.elements == elements
    )
