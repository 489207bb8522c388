"""Predictions: written before a run, hashed, and scored after it. A miss is kept as a miss.

The file is written once and never changed: its hash is printed before the run and stands in the
score, so that anyone can see that the numbers were there first. Scores nothing that was not
predicted, and loses no prediction: one without a measurement counts as a miss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FORMAT: Final = "prestage-predictions/1"
SCORE_FORMAT: Final = "prestage-prediction-score/1"


class PredictionError(ValueError):
    """A prediction file that cannot be written, read or scored; names the file and the quantity."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One predicted quantity and its band, ends included."""

    quantity: str  # Unique in its file, e.g. "staged_before/step_seconds".
    value: float
    low: float
    high: float
    unit: str = "s"
    why: str = ""  # Where the number comes from.

    def __post_init__(self) -> None:
        if not self.quantity:
            raise PredictionError("a prediction needs a quantity's name")
        if not all(math.isfinite(number) for number in (self.value, self.low, self.high)):
            raise PredictionError(
                f"prediction {self.quantity}: {self.value} [{self.low}, {self.high}] is not finite"
            )
        if not self.low <= self.value <= self.high:
            raise PredictionError(
                f"prediction {self.quantity}: {self.value} lies outside its own band"
                f" [{self.low}, {self.high}]"
            )


@dataclass(frozen=True, kw_only=True)
class PredictionFile:
    """What was predicted, and the hash of the bytes that say so."""

    about: str
    predictions: tuple[Prediction, ...]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Score:
    """One prediction and what came out."""

    prediction: Prediction
    measured: float | None  # None: not measured, which is a miss.

    @property
    def hit(self) -> bool:
        if self.measured is None or not math.isfinite(self.measured):
            return False
        return self.prediction.low <= self.measured <= self.prediction.high


@dataclass(frozen=True, kw_only=True)
class ScoreCard:
    """All predictions of one file, scored."""

    about: str
    sha256: str
    scores: tuple[Score, ...]
    unpredicted: tuple[str, ...]  # Measured quantities without a prediction: shown, not scored.

    @property
    def hits(self) -> int:
        return sum(score.hit for score in self.scores)

    @property
    def misses(self) -> tuple[Score, ...]:
        return tuple(score for score in self.scores if not score.hit)


def _check_unique(where: str, predictions: Sequence[Prediction]) -> None:
    if not predictions:
        raise PredictionError(f"{where}: no predictions")
    seen: set[str] = set()
    for prediction in predictions:
        if prediction.quantity in seen:
            raise PredictionError(f"{where}: {prediction.quantity} is predicted twice")
        seen.add(prediction.quantity)


def to_text(about: str, predictions: Sequence[Prediction]) -> str:
    """The file's text; the same for the same predictions."""
    _check_unique("predictions", predictions)
    value = {
        "format": FORMAT,
        "about": about,
        "predictions": [
            {
                "quantity": prediction.quantity,
                "value": prediction.value,
                "low": prediction.low,
                "high": prediction.high,
                "unit": prediction.unit,
                "why": prediction.why,
            }
            for prediction in predictions
        ],
    }
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def write(path: Path, about: str, predictions: Sequence[Prediction]) -> PredictionFile:
    """Write a new prediction file. Raises `PredictionError` when one is already there."""
    text = to_text(about, predictions)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise PredictionError(
            f"{path}: is there already, and predictions are never changed: use another name"
        ) from error
    return read(path)


def announcement(path: Path, file: PredictionFile) -> str:
    """What to print before the run."""
    return f"predictions: {len(file.predictions)} in {path.name}, sha256 {file.sha256}"


_FIELDS: Final = {"quantity": "", "value": 0.0, "low": 0.0, "high": 0.0, "unit": "", "why": ""}


def read(path: Path) -> PredictionFile:
    """Read a prediction file. Raises `PredictionError`; unknown fields are an error."""
    try:
        data = path.read_bytes()
        found = json.loads(data)
    except (OSError, ValueError) as error:
        raise PredictionError(f"{path}: cannot be read ({error})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PredictionError(f"{path}: not a file of format {FORMAT}")
    items = found.get("predictions")
    if not isinstance(items, list):
        raise PredictionError(f"{path}: no 'predictions'")
    predictions = tuple(_item(f"{path}: prediction {n}", item) for n, item in enumerate(items))
    _check_unique(str(path), predictions)
    return PredictionFile(
        about=str(found.get("about", "")),
        predictions=predictions,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _item(where: str, item: object) -> Prediction:
    if not isinstance(item, dict) or set(item) != set(_FIELDS):
        raise PredictionError(f"{where}: needs exactly the fields {', '.join(_FIELDS)}")
    for name, example in _FIELDS.items():
        value = item[name]
        right = (
            isinstance(value, str)
            if isinstance(example, str)
            else isinstance(value, int | float) and not isinstance(value, bool)
        )
        if not right:
            raise PredictionError(f"{where}: {name} is {value!r}")
    return Prediction(
        quantity=item["quantity"],
        value=float(item["value"]),
        low=float(item["low"]),
        high=float(item["high"]),
        unit=item["unit"],
        why=item["why"],
    )


def score(path: Path, measured: Mapping[str, float], *, expected_sha256: str = "") -> ScoreCard:
    """Score a file against what was measured.

    Raises `PredictionError` when the file is not the one whose hash was printed before the run.
    """
    file = read(path)
    if expected_sha256 and file.sha256 != expected_sha256:
        raise PredictionError(
            f"{path}: changed since the run began (sha256 {file.sha256}, announced"
            f" {expected_sha256}): it cannot be scored"
        )
    names = {prediction.quantity for prediction in file.predictions}
    return ScoreCard(
        about=file.about,
        sha256=file.sha256,
        scores=tuple(
            Score(prediction=prediction, measured=measured.get(prediction.quantity))
            for prediction in file.predictions
        ),
        unpredicted=tuple(sorted(set(measured) - names)),
    )


def to_json(card: ScoreCard) -> str:
    value = {
        "format": SCORE_FORMAT,
        "about": card.about,
        "predictions_sha256": card.sha256,
        "hits": card.hits,
        "misses": len(card.misses),
        "scores": [
            {
                "quantity": item.prediction.quantity,
                "value": item.prediction.value,
                "low": item.prediction.low,
                "high": item.prediction.high,
                "unit": item.prediction.unit,
                "measured": item.measured,
                "hit": item.hit,
            }
            for item in card.scores
        ],
        "unpredicted": list(card.unpredicted),
    }
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _number(value: float) -> str:
    return f"{value:.6g}"


def table_lines(card: ScoreCard) -> list[str]:
    """The score as text: every prediction, hits and misses alike."""
    rows = [("quantity", "predicted", "band", "measured", "unit", "")]
    for item in card.scores:
        prediction = item.prediction
        rows.append(
            (
                prediction.quantity,
                _number(prediction.value),
                f"[{_number(prediction.low)}, {_number(prediction.high)}]",
                "not measured" if item.measured is None else _number(item.measured),
                prediction.unit,
                "hit" if item.hit else "MISS",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if 1 <= column <= 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.append(f"{card.hits} of {len(card.scores)} hit (predictions sha256 {card.sha256})")
    if card.unpredicted:
        lines.append(f"measured, not predicted: {', '.join(card.unpredicted)}")
    return lines


def _measured(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictionError(f"{path}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise PredictionError(f"{path}: needs one object, quantity to number")
    out: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PredictionError(f"{path}: {name} is {value!r}; use a number")
        out[name] = float(value)
    return out


def main(argv: Sequence[str]) -> int:
    """`hash FILE` before a run, `score FILE MEASURED.json` after it. 2: a file is wrong."""
    parser = argparse.ArgumentParser(
        prog="orchestrator bench predictions", description="Predictions, before and after a run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    before = commands.add_parser("hash", help="check a prediction file and print its hash")
    before.add_argument("file", type=Path)
    after = commands.add_parser("score", help="score a prediction file; misses are kept")
    after.add_argument("file", type=Path)
    after.add_argument("measured", type=Path, help="JSON: quantity to number")
    after.add_argument("--sha256", default="", help="the hash that was printed before the run")
    after.add_argument("--out", type=Path, default=None, help="write the score as JSON")
    args = parser.parse_args(argv)
    try:
        if args.command == "hash":
            print(announcement(args.file, read(args.file)))
            return 0
        card = score(args.file, _measured(args.measured), expected_sha256=args.sha256)
    except PredictionError as error:
        print(f"orchestrator bench predictions: {error}", file=sys.stderr)
        return 2
    print("\n".join(table_lines(card)))
    if args.out is not None:
        args.out.write_text(to_json(card), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
