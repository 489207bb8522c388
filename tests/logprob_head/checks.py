"""Named checks of the sharded heads, each a function of the package under test.

The tests run them on the real package; the mutants must each fail the one named for them.
"""

from collections.abc import Callable
from types import ModuleType

import numpy as np

from tests.logprob_head.cases import Case, expected, leaf_error, outcome, run, sample, token_error
from trainer_worker.logprob_head.hlo_count import gathers, looped_collectives, reductions

LOGPROB_ABS = 5e-5
ENTROPY_ABS = 2e-4
GRADIENT_REL = 5e-6
GRADIENT_TOKEN_REL = 2e-5

# Ragged chunks, every option on, and a mesh whose axes are in another order than the layout's.
NUMERIC = Case(
    mesh=(("context", 2), ("expert", 2), ("fsdp", 2)),
    temperature=0.7,
    final_softcap=4.0,
    norm=True,
)
COUNTED = Case(rows=4, tokens=128, features=32, vocab=96, chunk_tokens=16, norm=True)


def check_logprobs(head: ModuleType, case: Case) -> None:
    got, want = outcome(head, case).logprobs, expected(case).logprobs
    assert np.abs(got - want).max() <= LOGPROB_ABS


def check_entropy(head: ModuleType, case: Case) -> None:
    got, want = outcome(head, case).entropy, expected(case).entropy
    assert np.abs(got - want).max() <= ENTROPY_ABS


def check_hidden_gradient(head: ModuleType, case: Case) -> None:
    got, want = outcome(head, case).d_hidden, expected(case).d_hidden
    assert leaf_error(got, want) <= GRADIENT_REL
    assert token_error(got, want) <= GRADIENT_TOKEN_REL


def check_table_gradient(head: ModuleType, case: Case) -> None:
    got, want = outcome(head, case).d_table, expected(case).d_table
    assert leaf_error(got, want) <= GRADIENT_REL
    assert token_error(got, want) <= GRADIENT_TOKEN_REL


def check_norm_gradient(head: ModuleType, case: Case) -> None:
    got, want = outcome(head, case).d_norm_scale, expected(case).d_norm_scale
    assert got is not None and want is not None
    assert leaf_error(got, want) <= GRADIENT_REL


def check_non_finite_surfaces(head: ModuleType, case: Case) -> None:
    """NaN and both infinities in one feature give NaN there and leave the other tokens alone."""
    inputs = sample(case)
    broken = {(0, 3): np.nan, (1, 30): np.inf, (3, 47): -np.inf}
    for token, value in broken.items():
        inputs.hidden[(*token, 2)] = value
    got = run(head, case).outcome(inputs)
    at = tuple(np.array(list(broken)).T)
    assert np.isnan(got.logprobs[at]).all() and np.isnan(got.entropy[at]).all()
    assert np.isfinite(got.logprobs).sum() == got.logprobs.size - len(broken)
    assert np.isfinite(got.entropy).sum() == got.entropy.size - len(broken)
    assert np.isnan(got.d_table).all()


def check_infinite_table_surfaces(head: ModuleType, case: Case) -> None:
    """An infinite weight would give ids of probability 0, or with the soft-cap healthy ones."""
    inputs = sample(case)
    inputs.table[7, 2] = -np.inf
    got = run(head, case).outcome(inputs)
    assert np.isnan(got.logprobs).all() and np.isnan(got.entropy).all()


def check_unknown_ids(head: ModuleType, case: Case) -> None:
    """Ids outside the vocabulary: NaN log-prob, same entropy, and no gradient of the log-prob."""
    inputs = sample(case)
    for token, bad in {(0, 3): case.vocab, (1, 30): -1, (2, 10): 2**30}.items():
        inputs.targets[token] = bad
        inputs.b[token] = 0.0
    got, plain = run(head, case).outcome(inputs), expected(case)
    bad = (inputs.targets < 0) | (inputs.targets >= case.vocab)
    assert np.array_equal(np.isnan(got.logprobs), bad)
    assert np.abs(got.entropy - plain.entropy).max() <= ENTROPY_ABS
    assert np.abs(got.d_hidden[bad]).max() == 0.0


def check_table_moves_once(head: ModuleType, case: Case) -> None:
    """One gather of the table (or of this device's slice of it) and one reduction of its gradient."""
    program = run(head, case).program()
    parts = dict(case.mesh)["context"] if case.mode == "vocab" else 1
    elements = case.vocab * case.features // parts
    assert (gathers(program, elements), reductions(program, elements)) == (1, 1)
    whole = case.vocab * case.features
    assert parts == 1 or (gathers(program, whole), reductions(program, whole)) == (0, 0)


def check_quiet_loops(head: ModuleType, case: Case) -> None:
    assert looped_collectives(run(head, case).program()) == 0


def check_flops(head: ModuleType, case: Case) -> None:
    """Forward, recomputed forward and two backward matmuls of 2 B T D V, shared by all devices."""
    devices = np.prod([size for _, size in case.mesh])
    want = 8 * case.rows * case.tokens * case.features * case.vocab / devices
    assert abs(run(head, case).program().matmul_flops() / want - 1) <= 0.01


Check = Callable[[ModuleType, Case], None]
NUMERIC_CHECKS: tuple[Check, ...] = (
    check_logprobs,
    check_entropy,
    check_hidden_gradient,
    check_table_gradient,
    check_norm_gradient,
    check_non_finite_surfaces,
    check_infinite_table_surfaces,
    check_unknown_ids,
)
PROGRAM_CHECKS: tuple[Check, ...] = (check_table_moves_once, check_quiet_loops, check_flops)
