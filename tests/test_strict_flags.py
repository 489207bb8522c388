"""Switches parse strictly."""

from __future__ import annotations

import pytest
from absl import flags

from prestage.strict_flags import (
    define_finite_float,
    define_strict_bool,
    environment_bool,
    parse_strict_bool,
)


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "On", "yes", " Yes "])
def test_true(text: str) -> None:
    assert parse_strict_bool("x", text) is True


@pytest.mark.parametrize("text", ["0", "false", "False", "OFF", "no"])
def test_false(text: str) -> None:
    assert parse_strict_bool("x", text) is False


@pytest.mark.parametrize("text", ["TRUEE", "", "2", "t", "y", "none", "-1"])
def test_anything_else_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(ValueError, match="STAGE_NEXT_MICROBATCH"):
        environment_bool({"STAGE_NEXT_MICROBATCH": text}, "STAGE_NEXT_MICROBATCH")


def test_unset_is_none() -> None:
    assert environment_bool({}, "STAGE_NEXT_MICROBATCH") is None


def test_flags_take_no_prefix_and_strict_values() -> None:
    values = flags.FlagValues()
    holder_name = "strict_for_test"
    original = flags.FLAGS
    try:
        define_strict_bool(holder_name, False, "a switch")
        define_finite_float("finite_for_test", 1.0, "a number")
        original(["program", f"--{holder_name}"])
        assert original[holder_name].value is True
        original(["program", f"--no{holder_name}"])
        assert original[holder_name].value is False
        original(["program", f"--{holder_name}=on"])
        assert original[holder_name].value is True
        with pytest.raises(flags.IllegalFlagValueError, match="TRUEE"):
            original(["program", f"--{holder_name}=TRUEE"])
        with pytest.raises(flags.IllegalFlagValueError, match="finite"):
            original(["program", "--finite_for_test=nan"])
    finally:
        delattr(original, holder_name)
        delattr(original, "finite_for_test")
    assert len(values) == 0
