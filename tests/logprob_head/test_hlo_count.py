"""The HLO reader counts what a program runs, loops included, and refuses to guess."""

import pytest

from trainer_worker.logprob_head.hlo_count import (
    HloReadError,
    Program,
    gathers,
    looped_collectives,
    received_bytes,
    reductions,
)

TEXT = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[4,6], q: f32[6,8]) -> f32[4,8] {
  %p = f32[4,6]{1,0} parameter(0)
  %q = f32[6,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], f32[4,6], f32[6,8])) -> (s32[], f32[4,6], f32[6,8]) {
  %s = (s32[], f32[4,6]{1,0}, /*index=2*/f32[6,8]{1,0}) parameter(0)
  %x = f32[4,6]{1,0} get-tuple-element(%s), index=1
  %w = f32[6,8]{1,0} get-tuple-element(%s), index=2
  %y = f32[4,8]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused
  %r = f32[4,8]{1,0} all-reduce(%y), channel_id=2, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[4,6]{1,0}, f32[6,8]{1,0}) tuple(%i, %x, %w)
}

%cond (s: (s32[], f32[4,6], f32[6,8])) -> pred[] {
  %s = (s32[], f32[4,6]{1,0}, f32[6,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: f32[4,6], w: f32[6,1]) -> f32[6,1] {
  %x = f32[4,6]{1,0} parameter(0)
  %w = f32[6,1]{1,0} parameter(1)
  %g = f32[6,8]{1,0} all-gather(%w), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
  %t = (s32[], f32[4,6]{1,0}, f32[6,8]{1,0}) tuple(%i, %x, %g)
  %loop = (s32[], f32[4,6]{1,0}, f32[6,8]{1,0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %s = f32[6,8]{1,0} get-tuple-element(%loop), index=2
  %m = (f32[6,8]{1,0}, f32[3]{0}) all-reduce(%s, %v), replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([8]) {'axis_0', 'axis_1'}, to_apply=%add
  %v = f32[3]{0} constant({1, 2, 3})
  ROOT %out = f32[6,1]{1,0} reduce-scatter(%s), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}
"""


def test_counts_loops_by_their_trips() -> None:
    program = Program(TEXT)
    assert program.matmul_flops() == 5 * 2 * 4 * 6 * 8
    assert reductions(program, 32) == 5
    assert looped_collectives(program) == 1


def test_counts_gathers_scatters_and_each_array_of_a_combined_reduction() -> None:
    program = Program(TEXT)
    assert gathers(program, 48) == 1
    assert reductions(program, 48) == 2
    assert reductions(program, 3) == 1


def test_received_bytes_follow_ring_collectives() -> None:
    """Gather and scatter 7/8 of 192 B, reductions twice 7/8 of 192 + 12 B and 5 times 1/2 of 128."""
    want = 7 / 8 * 192 * 2 + 2 * 7 / 8 * (192 + 12) + 5 * 2 * 1 / 2 * 128
    assert received_bytes(Program(TEXT)) == pytest.approx(want)


def test_asynchronous_pairs_count_once() -> None:
    text = TEXT.replace(
        "%g = f32[6,8]{1,0} all-gather(%w), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}",
        "%h = (f32[6,1]{1,0}, f32[6,8]{1,0}) all-gather-start(%w), replica_groups={{0,1,2,3,4,5,6,7}}\n"
        "  %g = f32[6,8]{1,0} all-gather-done(%h)",
    )
    assert gathers(Program(text), 48) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (', backend_config={"known_trip_count":{"n":"5"}}', "", "no known trip count"),
        ("[4,2]<=[8]", "??", "cannot read its replica groups"),
        ("ENTRY ", "", "no ENTRY"),
        ("%less = pred[] constant(true)", "%less pred[]", "cannot read the instruction"),
        (
            "fusion(%x, %w), kind=kOutput, calls=%fused",
            'custom-call(%x, %w), custom_call_target="__onednn$matmul"',
            "not counted",
        ),
    ],
)
def test_what_it_would_have_to_guess_is_an_error(old: str, new: str, said: str) -> None:
    assert old in TEXT
    with pytest.raises(HloReadError, match=said):
        program = Program(TEXT.replace(old, new))
        program.matmul_flops()
        program.collectives()
