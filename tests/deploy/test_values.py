"""Recipe values: one parser from text; anything odd is an error that names the key."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.recipes.keys import KEYS
from orchestrator.recipes.load import parse_recipe
from orchestrator.recipes.values import Kind, RecipeError, parse_value, value_text
from tests.deploy.recipes import demo

SWITCHES = [name for name, key in KEYS.items() if key.kind is Kind.SWITCH]


@pytest.mark.parametrize("text", ["1", "true", "True", "TRUE", "on", "On", "YES", " yes "])
def test_a_switch_is_on_in_any_spelling(text: str) -> None:
    assert parse_value("S", Kind.SWITCH, text) is True


@pytest.mark.parametrize("text", ["0", "false", "FALSE", "off", "Off", "no", "NO"])
def test_a_switch_is_off_in_any_spelling(text: str) -> None:
    assert parse_value("S", Kind.SWITCH, text) is False


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("text", ["", "2", "TRUEE", "enabled", "-1", "null", "true false"])
def test_an_odd_switch_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(RecipeError, match=name):
        demo(**{name: text})


@pytest.mark.parametrize("text", ["-1", "-1.0", "-1e0", " -1.00 "])
def test_follow_up_4_the_buffer_factor_is_a_number(text: str) -> None:
    settings = demo(RAGGED_BUFFER_FACTOR=text)
    assert settings.number("RAGGED_BUFFER_FACTOR") == -1
    assert not settings.bounded


@pytest.mark.parametrize("text", ["", "nan", "inf", "-inf", "0", "0.5", "-2", "2,75", "true"])
def test_a_buffer_factor_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="RAGGED_BUFFER_FACTOR"):
        demo(RAGGED_BUFFER_FACTOR=text, RETRY_WHEN_TOKENS_DROPPED="true")


@given(st.floats(min_value=1, max_value=1e6))
def test_a_number_survives_being_printed(value: float) -> None:
    assert parse_value("N", Kind.BUFFER, value_text(value)) == value


@given(st.text(max_size=30))
def test_no_text_crashes_a_parser(text: str) -> None:
    for kind in Kind:
        try:
            value = parse_value("K", kind, text)
        except RecipeError as error:
            assert "K" in str(error)
        else:
            assert value is not None
            if isinstance(value, float):
                assert math.isfinite(value)
            assert parse_value("K", kind, value_text(value)) == value


@pytest.mark.parametrize("text", ["off", "OFF", "0", "false", "no"])
def test_the_head_has_an_off_switch(text: str) -> None:
    assert demo(LOGPS_SHARDED_HEAD=text).text("LOGPS_SHARDED_HEAD") == "off"


@pytest.mark.parametrize("text", ["", "1", "on", "true", "locall"])
def test_the_head_is_never_on_by_a_guess(text: str) -> None:
    with pytest.raises(RecipeError, match="LOGPS_SHARDED_HEAD"):
        demo(LOGPS_SHARDED_HEAD=text)


@pytest.mark.parametrize(
    "image",
    [
        "prestage",
        "registry.example/prestage:latest",
        "registry.example/prestage:1.0",
        "registry.example/prestage@sha256:abc",
        f"registry.example/prestage@sha256:{'G' * 64}",
        f"registry.example/prestage@sha256:{'0' * 64} ",
        f"@sha256:{'0' * 64}",
    ],
)
def test_an_image_is_named_by_digest_only(image: str) -> None:
    if image.endswith(" "):
        assert demo(worker_image=image).text("worker_image") == image.strip()
        return
    with pytest.raises(RecipeError, match="digest"):
        demo(worker_image=image)


# -- YAML ----------------------------------------------------------------------------------------


def test_yaml_scalars_stay_text() -> None:
    text = "A: on\nB: 1e-3\nC: 12:30\nD: 0x10\nE: 4x4x8\nF: '1'\nG: -1.0\n"
    assert dict(parse_recipe(text, "r")) == {
        "A": "on",
        "B": "1e-3",
        "C": "12:30",
        "D": "0x10",
        "E": "4x4x8",
        "F": "1",
        "G": "-1.0",
    }


def test_a_mapping_becomes_pairs() -> None:
    assert parse_recipe("M: {a: 1, b: x}\n", "r")["M"] == "a=1 b=x"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("A: 1\nA: 2\n", "stands twice"),
        ("- A\n", "no mapping"),
        ("A: [1, 2]\n", "is a list"),
        ("A: !!python/object/apply:os.system ['true']\n", "list|tag"),
        ("A: !!python/name:os.system x\n", "tag"),
        ("A: !secret x\n", "tag"),
        ("? [1]\n: 2\n", "plain name"),
        ("M: {a: {b: 1}}\n", "no single value"),
        ("M: {a: 'b c'}\n", "white space"),
        ("M: {a: 1, a: 2}\n", "stands twice"),
        ("A: 'unclosed\n", "no YAML"),
        ("", "no mapping"),
        ("A: " + "[" * 3000, "no YAML"),
    ],
)
def test_odd_yaml_is_refused(text: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        parse_recipe(text, "r")
