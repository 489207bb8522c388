"""Deliberately broken heads: one small edit each of a copy of the package, and the check it fails.

`python -m tests.logprob_head.mutants` prints the table below with what each check said.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import trainer_worker.logprob_head as package
from tests.logprob_head import checks
from tests.logprob_head.cases import Case
from tests.logprob_head.checks import COUNTED, NUMERIC, Check

LOCAL, VOCAB = NUMERIC.replace(mode="local"), NUMERIC.replace(mode="vocab")
LOCAL_COUNTED, VOCAB_COUNTED = COUNTED.replace(mode="local"), COUNTED.replace(mode="vocab")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """In `file`, `old` (found exactly once) becomes `new`; `check` on `case` must then fail."""

    name: str
    file: str
    old: str
    new: str
    check: Check
    case: Case


MUTANTS = (
    Mutant(
        name="scores another rank's tokens",
        file="local.py",
        old="_score_tokens(hidden, gathered, targets, config)",
        new="_score_tokens(jax.lax.ppermute(hidden, 'context', [(0, 1), (1, 0)]), gathered,"
        " targets, config)",
        check=checks.check_logprobs,
        case=LOCAL,
    ),
    Mutant(
        name="returns another rank's tokens",
        file="vocab.py",
        old="start = jax.lax.axis_index(group) * layout.local_tokens",
        new="start = (1 - jax.lax.axis_index(group)) * layout.local_tokens",
        check=checks.check_logprobs,
        case=VOCAB,
    ),
    Mutant(
        name="target off by one",
        file="score.py",
        old="index = jnp.where(known, targets, 0)[..., None]",
        new="index = jnp.where(known, jnp.roll(targets, -1, axis=1), 0)[..., None]",
        check=checks.check_logprobs,
        case=LOCAL,
    ),
    Mutant(
        name="backward's target off by one",
        file="local.py",
        old="onehot=y[..., None] == ids",
        new="onehot=y[..., None] == ids + 1",
        check=checks.check_hidden_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="slice's target not offset",
        file="vocab.py",
        old="everyone - jax.lax.axis_index(group) * slice_ids",
        new="everyone - 0 * jax.lax.axis_index(group)",
        check=checks.check_logprobs,
        case=VOCAB,
    ),
    Mutant(
        name="table gradient not reduced",
        file="local.py",
        old="table=reduce(whole.table, layout.axes, table_dim).astype(dtypes.table)",
        new="table=jax.lax.dynamic_slice_in_dim(whole.table, jax.lax.axis_index(layout.axes)"
        " * (whole.table.shape[1] // layout.devices), whole.table.shape[1] // layout.devices, 1)",
        check=checks.check_table_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="gradients reduced twice",
        file="layout.py",
        old="        x, axes, scatter_dimension",
        new="        jax.lax.pcast(jax.lax.psum(x, axes), axes, to='varying'), axes,"
        " scatter_dimension",
        check=checks.check_table_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="norm-scale gradient not reduced",
        file="local.py",
        old="else reduce(scale, layout.axes, 0).astype(dtypes.norm_scale)",
        new="else jax.lax.dynamic_slice_in_dim(scale, jax.lax.axis_index(layout.axes)"
        " * (scale.shape[0] // layout.devices), scale.shape[0] // layout.devices)",
        check=checks.check_norm_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="hidden gradient not summed over slices",
        file="vocab.py",
        old="pull_norm(reduce(doperand, group, 1))",
        new="pull_norm(own(doperand))",
        check=checks.check_hidden_gradient,
        case=VOCAB,
    ),
    Mutant(
        name="table gradient summed in bfloat16",
        file="local.py",
        old="return jax.tree.map(jnp.add, total, HeadParams(dtable, dscale)), dh",
        new="return jax.tree.map(lambda t, d: (t.astype(jnp.bfloat16) + d.astype(jnp.bfloat16))"
        ".astype(jnp.float32), total, HeadParams(dtable, dscale)), dh",
        check=checks.check_table_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="last chunk only",
        file="local.py",
        old="return jax.tree.map(jnp.add, total, HeadParams(dtable, dscale)), dh",
        new="return HeadParams(dtable, dscale), dh",
        check=checks.check_table_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="chunk padding counted",
        file="chunks.py",
        old="[(0, 0)] * (x.ndim - 2))",
        new="[(0, 0)] * (x.ndim - 2), mode='edge')",
        check=checks.check_table_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="entropy of the distribution before temperature",
        file="score.py",
        old="entropy = log_total - jnp.sum(weights * shifted, axis=-1) / total",
        new="entropy = -jnp.sum(jax.nn.softmax(raw) * jax.nn.log_softmax(raw), axis=-1)",
        check=checks.check_entropy,
        case=LOCAL,
    ),
    Mutant(
        name="entropy's gradient dropped",
        file="gradient.py",
        old="pull = cotangents.logprobs[..., None] + cotangents.entropy[..., None] * (",
        new="pull = cotangents.logprobs[..., None] + 0.0 * (",
        check=checks.check_hidden_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="temperature ignored",
        file="score.py",
        old="return raw / config.temperature if config.temperature != 1.0 else raw",
        new="return raw",
        check=checks.check_logprobs,
        case=LOCAL,
    ),
    Mutant(
        name="temperature ignored in the backward",
        file="gradient.py",
        old="draw = (dz / config.temperature)",
        new="draw = dz",
        check=checks.check_hidden_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="soft-cap ignored",
        file="score.py",
        old="if config.final_softcap is not None:",
        new="if False:",
        check=checks.check_logprobs,
        case=LOCAL,
    ),
    Mutant(
        name="soft-cap ignored in the backward",
        file="gradient.py",
        old="if config.final_softcap is not None:",
        new="if False:",
        check=checks.check_table_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="soft-cap after temperature",
        file="score.py",
        old="raw = config.final_softcap * jnp.tanh(raw / config.final_softcap)",
        new="return config.final_softcap * jnp.tanh(raw / config.temperature"
        " / config.final_softcap)",
        check=checks.check_logprobs,
        case=LOCAL,
    ),
    Mutant(
        name="non-finite guard removed",
        file="score.py",
        old="return jnp.isfinite(jnp.max(jnp.abs(raw), axis=-1))",
        new="return jnp.max(jnp.abs(raw), axis=-1) >= 0.0",
        check=checks.check_non_finite_surfaces,
        case=LOCAL.replace(norm=False),
    ),
    Mutant(
        name="slices' non-finite guard not combined",
        file="vocab.py",
        old="finite = broken == 0",
        new="finite = broken >= 0",
        check=checks.check_non_finite_surfaces,
        case=VOCAB.replace(norm=False),
    ),
    Mutant(
        name="unknown ids clipped",
        file="score.py",
        old="logprobs=jnp.where(finite & known, logprobs, jnp.nan)",
        new="logprobs=jnp.where(finite, logprobs, jnp.nan)",
        check=checks.check_unknown_ids,
        case=LOCAL,
    ),
    Mutant(
        name="axes gathered in mesh order",
        file="layout.py",
        old="return jax.lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x",
        new="return jax.lax.all_gather(x, tuple(sorted(axes)), axis=dimension, tiled=True)",
        check=checks.check_logprobs,
        case=LOCAL,
    ),
    Mutant(
        name="axes scattered in mesh order",
        file="layout.py",
        old="        x, axes, scatter_dimension",
        new="        x, tuple(sorted(axes)), scatter_dimension",
        check=checks.check_table_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="norm scale holds no gradient",
        file="score.py",
        old="norm_scale.astype(jnp.float32)",
        new="jax.lax.stop_gradient(norm_scale).astype(jnp.float32)",
        check=checks.check_norm_gradient,
        case=LOCAL,
    ),
    Mutant(
        name="only the first slice counted",
        file="vocab.py",
        old="= total(sums, group)",
        new="= total(jnp.where(jax.lax.axis_index(group) == 0, sums, 0.0), group)",
        check=checks.check_logprobs,
        case=VOCAB,
    ),
    Mutant(
        name="slices combined without their peaks",
        file="vocab.py",
        old="rescale = jnp.exp(drop)",
        new="rescale = jnp.ones_like(drop)",
        check=checks.check_logprobs,
        case=VOCAB,
    ),
    Mutant(
        name="table gathered in every chunk",
        file="local.py",
        old="normed(x, whole.norm_scale, config).astype(config.compute_dtype), whole.table",
        new="normed(x, whole.norm_scale, config).astype(config.compute_dtype),"
        " jax.lax.all_gather(jax.lax.dynamic_slice_in_dim(whole.table, 4 * jax.lax.axis_index("
        "('fsdp', 'expert', 'context')), 4, 1) + 0.0 * x[0, 0, 0],"
        " ('fsdp', 'expert', 'context'), axis=1, tiled=True)",
        check=checks.check_quiet_loops,
        case=LOCAL_COUNTED,
    ),
    Mutant(
        name="table gradient reduced in every chunk",
        file="local.py",
        old="return jax.tree.map(jnp.add, total, HeadParams(dtable, dscale)), dh",
        new="dtable = jax.lax.pcast(jax.lax.psum(dtable, layout.axes), layout.axes, to='varying')"
        " / layout.devices\n"
        "        return jax.tree.map(jnp.add, total, HeadParams(dtable, dscale)), dh",
        check=checks.check_table_moves_once,
        case=LOCAL_COUNTED,
    ),
    Mutant(
        name="whole table on each slice's device",
        file="vocab.py",
        old="return gather(swap(part, group, split=0, join=1), layout.row_axes, 1)",
        new="return jax.lax.dynamic_slice_in_dim(gather(part, layout.axes, 1),"
        " jax.lax.axis_index(group) * slice_ids, slice_ids, 0)",
        check=checks.check_table_moves_once,
        case=VOCAB_COUNTED,
    ),
    Mutant(
        name="every rank scores all tokens of its rows",
        file="layout.py",
        old="token_axes=token_axes,",
        new="token_axes=(),",
        check=checks.check_flops,
        case=LOCAL_COUNTED,
    ),
    Mutant(
        name="each chunk scored twice",
        file="local.py",
        old="return carry, score_and_lse(raw, y, config)",
        new="again = raw_logits(x * 2, whole.table) / 2\n"
        "        return carry, score_and_lse((raw + again) / 2, y, config)",
        check=checks.check_flops,
        case=LOCAL_COUNTED,
    ),
)


@contextmanager
def broken_package(mutant: Mutant, folder: Path) -> Iterator[ModuleType]:
    """A copy of the package with the mutant's edit, importable while the context lasts."""
    name = "broken_head_" + "".join(c if c.isalnum() else "_" for c in mutant.name)
    copy = folder / name
    copy.mkdir()
    for path in Path(package.__file__).parent.glob("*.py"):
        text = path.read_text()
        if path.name == mutant.file:
            if text.count(mutant.old) != 1:
                raise ValueError(
                    f"mutant {mutant.name!r}: {mutant.old!r} is {text.count(mutant.old)} times in"
                    f" {mutant.file}; bring the edit up to date"
                )
            text = text.replace(mutant.old, mutant.new)
        (copy / path.name).write_text(text.replace("trainer_worker.logprob_head", name))
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        for module in [m for m in sys.modules if m.split(".")[0] == name]:
            del sys.modules[module]


def caught_by(mutant: Mutant, folder: Path) -> str | None:
    """What the mutant's check said (one line), or None when it passed."""
    with broken_package(mutant, folder) as head:
        try:
            mutant.check(head, mutant.case)
        except AssertionError as error:
            return str(error).strip().splitlines()[0] if str(error) else "assertion failed"
    return None


def main() -> None:
    """Prints the table."""
    import tempfile

    print("| broken head | file | caught by |\n|---|---|---|")
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            said = caught_by(mutant, Path(folder))
        caught = mutant.check.__name__ if said is not None else "NOT CAUGHT"
        print(f"| {mutant.name} | {mutant.file} | {caught} ({mutant.case.mode}) |", flush=True)


if __name__ == "__main__":
    main()
