"""Predictions: written once, hashed before the run, scored after it, misses kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.bench import predictions as pre

STEP = pre.Prediction(quantity="staged/step_s", value=100.15, low=99.0, high=102.5)
GAP = pre.Prediction(quantity="staged/gap_s", value=0.25, low=0.0, high=1.5, why="host gap")


def test_hits_and_misses_are_both_kept(tmp_path: Path) -> None:
    path = tmp_path / "pre.json"
    file = pre.write(path, "a pair", [STEP, GAP])
    card = pre.score(
        path,
        {"staged/step_s": 100.007, "staged/gap_s": -0.05, "wall_s": 900.0},
        expected_sha256=file.sha256,
    )
    assert [score.hit for score in card.scores] == [True, False]
    assert [score.prediction.quantity for score in card.misses] == ["staged/gap_s"]
    assert card.unpredicted == ("wall_s",)
    text = "\n".join(pre.table_lines(card))
    assert "MISS" in text and "1 of 2 hit" in text and file.sha256 in text
    assert "measured, not predicted: wall_s" in text
    found = json.loads(pre.to_json(card))
    assert (found["hits"], found["misses"]) == (1, 1)
    assert found["scores"][1]["measured"] == -0.05


def test_a_quantity_that_was_not_measured_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "pre.json"
    pre.write(path, "", [STEP, GAP])
    card = pre.score(path, {"staged/step_s": 100.0, "staged/gap_s": float("nan")})
    assert [score.hit for score in card.scores] == [True, False]
    assert pre.score(path, {}).hits == 0


def test_predictions_are_never_changed(tmp_path: Path) -> None:
    path = tmp_path / "pre.json"
    file = pre.write(path, "", [STEP])
    with pytest.raises(pre.PredictionError, match="is there already"):
        pre.write(path, "", [GAP])
    assert file.sha256 in pre.announcement(path, file)
    path.write_text(path.read_text().replace("99.0", "90.0"))
    with pytest.raises(pre.PredictionError, match="changed since the run began"):
        pre.score(path, {"staged/step_s": 95.0}, expected_sha256=file.sha256)


@given(
    st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 3), min_size=1, max_size=5), st.floats(-1e6, 1e6)
)
def test_a_band_holds_its_ends_and_nothing_outside(
    bands: list[tuple[float, float, float]], measured: float
) -> None:
    for numbers in bands:
        low, value, high = sorted(numbers)
        prediction = pre.Prediction(quantity="x", value=value, low=low, high=high)
        assert pre.Score(prediction=prediction, measured=low).hit
        assert pre.Score(prediction=prediction, measured=high).hit
        hit = pre.Score(prediction=prediction, measured=measured).hit
        assert hit == (not (measured < low or measured > high))


@pytest.mark.parametrize(
    ("value", "low", "high"), [(3.0, 0.0, 1.0), (0.5, 1.0, 0.0), (float("nan"), 0.0, 1.0)]
)
def test_a_prediction_outside_its_band_is_refused(value: float, low: float, high: float) -> None:
    with pytest.raises(pre.PredictionError, match="prediction x"):
        pre.Prediction(quantity="x", value=value, low=low, high=high)


def test_the_same_quantity_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pre.PredictionError, match="predicted twice"):
        pre.write(tmp_path / "pre.json", "", [STEP, STEP])
    with pytest.raises(pre.PredictionError, match="no predictions"):
        pre.write(tmp_path / "pre.json", "", [])
    assert not (tmp_path / "pre.json").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, measured, out = tmp_path / "p.json", tmp_path / "m.json", tmp_path / "s.json"
    file = pre.write(path, "", [STEP, GAP])
    assert pre.main(["hash", str(path)]) == 0
    assert file.sha256 in capsys.readouterr().out
    measured.write_text(json.dumps({"staged/step_s": 100.0, "staged/gap_s": 9.0}))
    arguments = ["score", str(path), str(measured), f"--sha256={file.sha256}", f"--out={out}"]
    assert pre.main(arguments) == 0
    assert "1 of 2 hit" in capsys.readouterr().out
    assert json.loads(out.read_text())["misses"] == 1
    assert pre.main(["score", str(path), str(measured), "--sha256=0"]) == 2
    for wrong in ("{", "[]", '{"format": "prestage-predictions/1", "predictions": [{}]}'):
        path.write_text(wrong)
        assert pre.main(["hash", str(path)]) == 2
        assert "p.json" in capsys.readouterr().err
