"""What one compiled micro-batch does: collectives and FLOPs as exact counts, temporary memory.

The chunked head is the positive control: the same reader must see what it does wrong.
"""

import pytest

import trainer_worker.logprob_head as package
from tests.logprob_head.cases import Case, Run, run
from tests.logprob_head.checks import check_flops, check_quiet_loops, check_table_moves_once
from trainer_worker.logprob_head.hlo_count import (
    gathers,
    looped_collectives,
    received_bytes,
    reductions,
)
from trainer_worker.logprob_head.layout import Layout, fit_layout
from trainer_worker.logprob_head.select import head_cost

MICRO_BATCH = Case(rows=4, tokens=512, features=64, vocab=1280, chunk_tokens=32, norm=True)
CONTEXT_4 = MICRO_BATCH.replace(mesh=(("fsdp", 2), ("context", 4), ("expert", 1)))
TABLE = MICRO_BATCH.features * MICRO_BATCH.vocab
CHUNKS = MICRO_BATCH.tokens // MICRO_BATCH.chunk_tokens
MESHES = pytest.mark.parametrize("case", [MICRO_BATCH, CONTEXT_4], ids=["2x2x2", "2x4x1"])
SHARDED = pytest.mark.parametrize("mode", ["local", "vocab"])


def chunked(case: Case) -> Run:
    return run(package, case.replace(mode="off"))


@MESHES
@SHARDED
def test_table_moves_once_and_no_collective_runs_in_a_loop(case: Case, mode: str) -> None:
    check_table_moves_once(package, case.replace(mode=mode))
    check_quiet_loops(package, case.replace(mode=mode))


@SHARDED
def test_bfloat16_moves_no_more(mode: str) -> None:
    case = MICRO_BATCH.replace(mode=mode, dtype="bfloat16")
    check_table_moves_once(package, case)
    check_quiet_loops(package, case)


@SHARDED
def test_forward_alone_gathers_once_and_reduces_nothing(mode: str) -> None:
    program = run(package, MICRO_BATCH.replace(mode=mode), gradients=False).program()
    moved = TABLE if mode == "local" else TABLE // 2
    assert (gathers(program, moved), reductions(program, moved)) == (1, 0)
    assert looped_collectives(program) == 0


@MESHES
def test_the_chunked_head_moves_the_table_in_every_chunk(case: Case) -> None:
    program = chunked(case).program()
    assert gathers(program, TABLE) == CHUNKS + 1  # the forward's is hoisted, the backward's is not
    assert reductions(program, TABLE) == CHUNKS
    in_loop = [c for c in program.collectives() if c.looped and c.elements == TABLE]
    assert {c.kind for c in in_loop} >= {"all-gather"} and len(in_loop) >= 2


@MESHES
@SHARDED
def test_matmul_flops_fall_by_the_context_size(case: Case, mode: str) -> None:
    check_flops(package, case.replace(mode=mode))
    flops = run(package, case.replace(mode=mode)).program().matmul_flops()
    ratio = flops / chunked(case).program().matmul_flops()
    assert ratio * dict(case.mesh)["context"] == pytest.approx(1, rel=0.01)


@MESHES
@SHARDED
def test_temporary_memory_is_the_chunked_heads_plus_the_accumulator(case: Case, mode: str) -> None:
    accumulator = 4 * TABLE
    used = run(package, case.replace(mode=mode)).temp_bytes()
    assert used <= chunked(case).temp_bytes() + accumulator


@pytest.mark.parametrize("order", [("context", "expert", "fsdp"), ("expert", "context", "fsdp")])
def test_counts_do_not_depend_on_the_order_of_mesh_axes(order: tuple[str, ...]) -> None:
    case = MICRO_BATCH.replace(mesh=tuple((axis, 2) for axis in order))
    check_table_moves_once(package, case)
    check_quiet_loops(package, case)


@pytest.mark.parametrize("case", [MICRO_BATCH, CONTEXT_4], ids=["2x2x2", "2x4x1"])
@pytest.mark.parametrize("vocab", [160, 1280])
@SHARDED
def test_the_cost_rule_counts_the_bytes_that_the_program_receives(
    case: Case, vocab: int, mode: str
) -> None:
    case = case.replace(mode=mode, vocab=vocab)
    program = run(package, case).program()
    config = package.HeadConfig(chunk_tokens=case.chunk_tokens)
    layout = fit_layout(case.make_mesh(), config, rows=case.rows, tokens=case.tokens)
    assert isinstance(layout, Layout)
    cost = head_cost(layout, table=(vocab, case.features), compute_bytes=4)
    want = cost.local_bytes if mode == "local" else cost.vocab_bytes
    # The rule leaves out the norm scale and the objective's own sum.
    assert received_bytes(program) == pytest.approx(want, rel=0.01)
