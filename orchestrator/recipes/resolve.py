"""From texts to settings: one rule of precedence for every key, then the contradictions.

An explicit caller value, then the recipe, then the default (which may follow another key). Where
one explicit value, or an explicit value and one that a switch implies, differ, a note says so.
"""

from __future__ import annotations

import difflib
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from orchestrator.plan import PlanError, RunPlan
from orchestrator.recipes.keys import (
    BY_MAXTEXT,
    KEYS,
    TUNED_LIBTPU,
    TUNED_MAXTEXT,
    TUNED_PRECISION,
    Key,
)
from orchestrator.recipes.values import (
    Kind,
    Pairs,
    RecipeError,
    Value,
    parse_value,
    value_text,
)

STATE_DIR: Final = "/var/lib/prestage"
"""Where both programs keep what must outlive them."""
EXIT_MARGIN_S: Final = 10.0
"""What a program leaves of its grace, so that it ends before it is killed."""


class Origin(enum.Enum):
    """Where a value comes from, strongest first."""

    CALLER = "caller"
    RECIPE = "recipe"
    IMPLIED = "implied"
    DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every key with its value and origin, and what a person should hear of."""

    values: Mapping[str, Value]
    origins: Mapping[str, Origin]
    notes: tuple[str, ...]

    def switch(self, name: str) -> bool:
        value = self.values[name]
        assert isinstance(value, bool), name
        return value

    def whole(self, name: str) -> int:
        value = self.values[name]
        assert isinstance(value, int) and not isinstance(value, bool), name
        return value

    def number(self, name: str) -> float:
        value = self.values[name]
        assert isinstance(value, float), name
        return value

    def text(self, name: str) -> str:
        """Also of a key that is not set: empty."""
        value = self.values[name]
        assert value is None or isinstance(value, str), name
        return value or ""

    def pairs(self, name: str) -> Pairs:
        value = self.values[name]
        assert isinstance(value, tuple), name
        return value

    @property
    def bounded(self) -> bool:
        """Whether the MoE buffers are finite, so that tokens can overflow them."""
        return self.number("RAGGED_BUFFER_FACTOR") != -1

    @property
    def scored(self) -> bool:
        return self.whole("val_start_step") > 0

    @property
    def chips(self) -> int:
        return math.prod(int(part) for part in self.text("tpu_topology").split("x"))


@dataclass(kw_only=True)
class _Layer:
    """What one source says, typed. MaxText settings with a key of their own are moved there."""

    origin: Origin
    values: dict[str, Value] = field(default_factory=dict)


def _layer(origin: Origin, given: Mapping[str, str]) -> _Layer:
    layer = _Layer(origin=origin)
    for name, text in given.items():
        key = KEYS.get(name)
        if key is None:
            close = difflib.get_close_matches(name, KEYS, n=1) or difflib.get_close_matches(
                name.upper(), KEYS, n=1
            )
            hint = f": did you mean {close[0]}?" if close else ""
            raise RecipeError(f"{origin.value}: unknown key {name!r}{hint}")
        layer.values[name] = _parse(key, text)
    extra = layer.values.get("MAXTEXT_EXTRA_FLAGS")
    if isinstance(extra, tuple):
        layer.values["MAXTEXT_EXTRA_FLAGS"] = tuple(
            (setting, text) for setting, text in extra if not _moved(layer, setting, text, origin)
        )
    return layer


def _moved(layer: _Layer, setting: str, text: str, origin: Origin) -> bool:
    """Whether a MaxText setting has a key of its own; if so it is that key's value."""
    name = BY_MAXTEXT.get(setting)
    if name is None:
        return False
    value = _parse(KEYS[name], text)
    before = layer.values.setdefault(name, value)
    if before != value:
        raise RecipeError(
            f"{origin.value}: {name} is {value_text(before)} and MAXTEXT_EXTRA_FLAGS has"
            f" {setting}={text}: they are the same setting; keep one"
        )
    return True


def _parse(key: Key, text: str) -> Value:
    value = parse_value(key.name, key.kind, text, least=key.least)
    if key.choices and value not in key.choices:
        raise RecipeError(f"{key.name} is {text!r}: use one of {', '.join(key.choices)}")
    return value


class _Resolver:
    """Fills in one key after another; what a key implies reads those before it."""

    def __init__(self, layers: Iterable[_Layer]) -> None:
        self._layers = tuple(layers)  # Strongest first.
        self.values: dict[str, Value] = {}
        self.origins: dict[str, Origin] = {}
        self.notes: list[str] = []

    def take(self, name: str, implied: Value = None, by: str = "") -> None:
        """Settle one key. `implied`: what other keys make its default; `by`: which to name."""
        key = KEYS[name]
        if key.default is not None:
            weakest = (_parse_default(key), Origin.DEFAULT)
        else:
            weakest = (implied, Origin.IMPLIED if implied is not None else Origin.DEFAULT)
        said = [
            (layer.values[name], layer.origin) for layer in self._layers if name in layer.values
        ]
        self.values[name], self.origins[name] = (*said, weakest)[0]
        if by:
            said.append(weakest)
        self._note(name, said, by)

    def take_pairs(self, name: str, implied: Pairs, by: str) -> None:
        """Settle a key of pairs: the same rule, pair by pair."""
        sources: list[tuple[Pairs, Origin]] = []
        for layer in self._layers:
            value = layer.values.get(name, ())
            assert isinstance(value, tuple)
            sources.append((value, layer.origin))
        sources.append((implied, Origin.IMPLIED))
        merged: dict[str, str] = {}
        # Weakest first gives the order that people read: the set, then what was added.
        for pairs, _ in reversed(sources):
            merged.update(pairs)
        for item in merged:
            said: list[tuple[Value, Origin]] = [
                (dict(pairs)[item], origin) for pairs, origin in sources if item in dict(pairs)
            ]
            self._note(f"{name} {item}", said, by)
        self.values[name] = tuple(merged.items())
        strongest = next((origin for pairs, origin in sources if pairs), Origin.DEFAULT)
        self.origins[name] = strongest

    def _note(self, what: str, said: list[tuple[Value, Origin]], by: str) -> None:
        for value, origin in said[1:]:
            winner, strong = said[0]
            if value != winner:
                source = f"{by} implies" if origin is Origin.IMPLIED else f"the {origin.value} says"
                self.notes.append(
                    f"{what}: {value_text(winner)} ({strong.value}) overrides {value_text(value)},"
                    f" which {source}"
                )

    def switch(self, name: str) -> bool:
        return self.values[name] is True


def _parse_default(key: Key) -> Value:
    """A key's own default; an empty one stands for "not set" whatever the kind."""
    assert key.default is not None
    return _parse(key, key.default) if key.default or key.kind is Kind.PAIRS else ""


def resolve(recipe: Mapping[str, str], caller: Mapping[str, str]) -> Settings:
    """Settle every key and check them together. Raises `RecipeError`."""
    r = _Resolver((_layer(Origin.CALLER, caller), _layer(Origin.RECIPE, recipe)))
    for name in ("engine", "TRAINER_TUNED_FLAGS", "hosts", "val_start_step"):
        r.take(name)
    tuned = r.switch("TRAINER_TUNED_FLAGS")
    maxtext = r.values["engine"] == "maxtext"
    by = "TRAINER_TUNED_FLAGS" if tuned else ""
    r.take("RAGGED_BUFFER_FACTOR", 2.75 if tuned else -1.0, by)
    cell = tuned and r.values["RAGGED_BUFFER_FACTOR"] != -1
    r.take("RETRY_WHEN_TOKENS_DROPPED", cell, by)
    r.take("NUM_MOE_TOKEN_CHUNKS", 2 if cell else 4, by)
    r.take("REMAT_CONTEXT", "device" if cell else "offload", by)
    r.take("MOE_EXCLUDE_PADDING", cell, by)
    r.take("LOG_MOE_DROPS", cell, by)
    chunk = 1024 if tuned else 512  # Whatever the buffers' layout.
    r.take("COMPUTE_LOGPS_CHUNK_SIZE", chunk if maxtext else None, by)
    settings = (*TUNED_MAXTEXT, *TUNED_PRECISION) if tuned else ()
    r.take_pairs("MAXTEXT_EXTRA_FLAGS", settings, by)
    r.take_pairs("LIBTPU_INIT_ARGS", TUNED_LIBTPU if tuned else (), by)
    r.take("PIPELINE_STEP_BOUNDARY")
    r.take("STAGE_NEXT_MICROBATCH", "on" if r.switch("PIPELINE_STEP_BOUNDARY") else "off")
    r.take("require_drop_audit", r.values["val_start_step"] != 0)
    r.take("layout", "one-pod" if r.values["hosts"] == 1 else "separate")
    r.take("longest_micro_batch_s")
    r.take("checkpoint_s")
    r.take("grace_s", _least_grace(r.values) + 20.0)
    for name in KEYS:
        if name not in r.values:
            r.take(name)
    ordered = {name: r.values[name] for name in KEYS}
    resolved = Settings(
        values=MappingProxyType(ordered),
        origins=MappingProxyType({name: r.origins[name] for name in KEYS}),
        notes=(*r.notes, *_warnings(ordered)),
    )
    for name, key in KEYS.items():
        if key.required and resolved.values[name] is None:
            raise RecipeError(f"{name} is not set: {key.meaning[0].lower()}{key.meaning[1:]}")
    _check_trainer(resolved)
    _check_boundary(resolved)
    _check_run(resolved)
    _check_placement(resolved)
    return resolved


def _least_grace(values: Mapping[str, Value]) -> float:
    batch, checkpoint = values["longest_micro_batch_s"], values["checkpoint_s"]
    assert isinstance(batch, float) and isinstance(checkpoint, float)
    return math.ceil(batch + checkpoint) + EXIT_MARGIN_S


def _warnings(values: Mapping[str, Value]) -> list[str]:
    """Legal, and rarely meant."""
    notes = []
    bounded = values["RAGGED_BUFFER_FACTOR"] != -1
    if bounded and values["RETURN_ROUTED_EXPERTS"] is False:
        notes.append(
            "RETURN_ROUTED_EXPERTS is false with finite buffers: without router replay every"
            " micro-batch may overflow and run twice"
        )
    if not bounded and values["RETRY_WHEN_TOKENS_DROPPED"] is True:
        notes.append(
            "RETRY_WHEN_TOKENS_DROPPED does nothing: RAGGED_BUFFER_FACTOR is -1 and drops no token"
        )
    return notes


def _check_trainer(s: Settings) -> None:
    if s.text("engine") != "maxtext":
        for name, key in KEYS.items():
            explicit = s.origins[name] in (Origin.CALLER, Origin.RECIPE)
            if key.only_maxtext and explicit and s.values[name] not in (False, (), ""):
                raise RecipeError(
                    f"{name} is set, but engine {s.text('engine')} does not know it: use engine:"
                    f" maxtext, or remove {name}"
                )
    elif not s.text("trainer_factory"):
        raise RecipeError(
            "trainer_factory is not set, but engine is maxtext: name the function that builds your"
            " trainer, package.module:function"
        )
    if s.text("preset") and s.text("engine") != "jax":
        raise RecipeError(f"preset is set, but engine is {s.text('engine')}: presets are jax's")
    if s.text("accelerator") != "tpu":
        for name in ("TRAINER_TUNED_FLAGS", "LIBTPU_INIT_ARGS"):
            if s.values[name] not in (False, ()):
                raise RecipeError(f"{name} is set, but accelerator is cpu: it is for a TPU")
    if s.bounded and not s.switch("RETRY_WHEN_TOKENS_DROPPED"):
        raise RecipeError(
            f"RAGGED_BUFFER_FACTOR is {s.number('RAGGED_BUFFER_FACTOR'):g} without"
            " RETRY_WHEN_TOKENS_DROPPED: an overflow would drop tokens; set the retry, or use -1"
        )
    held = dict(s.pairs("MAXTEXT_EXTRA_FLAGS")).get("gdn_cp_state") == "device"
    if s.text("REMAT_POLICY") == "full" and (held or s.text("REMAT_CONTEXT") == "device"):
        what = "gdn_cp_state=device" if held else "REMAT_CONTEXT: device"
        raise RecipeError(
            f"REMAT_POLICY is full with {what}: state held on the device needs the custom policy;"
            " use REMAT_POLICY: custom, or do not hold it there"
        )
    if s.scored and not s.switch("LOG_MOE_DROPS"):
        raise RecipeError(
            f"val_start_step is {s.whole('val_start_step')}, so the run is scored, but"
            " LOG_MOE_DROPS is false: a scored run needs the drop audit; set LOG_MOE_DROPS: true"
        )
    if s.scored and not s.switch("require_drop_audit"):
        raise RecipeError("require_drop_audit is false in a scored run: remove it")
    if s.switch("require_drop_audit") and not s.switch("LOG_MOE_DROPS"):
        raise RecipeError(
            "require_drop_audit is set without LOG_MOE_DROPS: set LOG_MOE_DROPS: true"
        )


def _check_boundary(s: Settings) -> None:
    staging = s.text("STAGE_NEXT_MICROBATCH")
    if staging != "off" and not s.switch("PIPELINE_STEP_BOUNDARY"):
        raise RecipeError(
            f"STAGE_NEXT_MICROBATCH is {staging} without PIPELINE_STEP_BOUNDARY: staging needs the"
            " pipelined boundary; set PIPELINE_STEP_BOUNDARY: true, or STAGE_NEXT_MICROBATCH: off"
        )
    if staging == "on" and s.text("old_logprobs") == "trainer":
        raise RecipeError(
            "STAGE_NEXT_MICROBATCH is on with old_logprobs: trainer: every next micro-batch would"
            " need the updated weights, so none could be staged; set STAGE_NEXT_MICROBATCH: off"
        )
    try:
        RunPlan(
            num_steps=s.whole("num_steps"),
            pipeline=s.switch("PIPELINE_STEP_BOUNDARY"),
            stage=staging != "off",
            stage_before_update=s.switch("stage_before_update"),
            dispatch_before_metrics=s.switch("dispatch_before_metrics"),
            checkpoint_every=s.whole("checkpoint_every"),
            weight_sync_every=s.whole("weight_sync_every"),
            eval_every=s.whole("eval_every"),
            val_start_step=s.whole("val_start_step"),
        )
    except PlanError as error:
        raise RecipeError(str(error)) from error


def _check_run(s: Settings) -> None:
    if s.whole("eval_every") and not s.text("eval_rollouts"):
        raise RecipeError(
            f"eval_every is {s.whole('eval_every')} without eval_rollouts: set the Parquet file that"
            " evaluations score, or eval_every: 0"
        )
    if s.whole("checkpoint_every") and not s.text("checkpoint_dir"):
        raise RecipeError(
            f"checkpoint_every is {s.whole('checkpoint_every')} without checkpoint_dir: set the"
            " folder, or checkpoint_every: 0"
        )
    folder = s.text("checkpoint_dir")
    if folder and "://" not in folder and not folder.startswith(f"{STATE_DIR}/"):
        raise RecipeError(
            f"checkpoint_dir is {folder!r}: it would not outlive the process; use a folder under"
            f" {STATE_DIR}/ or a URL such as gs://bucket/path"
        )
    least = _least_grace(s.values)
    if s.number("grace_s") < least:
        raise RecipeError(
            f"grace_s is {s.number('grace_s'):g}: the longest micro-batch, a checkpoint and"
            f" {EXIT_MARGIN_S:g} s to end need {least:g}; a shorter grace would kill them"
        )


def _check_placement(s: Settings) -> None:
    hosts, layout = s.whole("hosts"), s.text("layout")
    if hosts > 1 and layout == "one-pod":
        raise RecipeError(f"layout is one-pod with {hosts} hosts: use layout: separate")
    if s.text("accelerator") == "tpu":
        if not s.text("tpu_topology"):
            raise RecipeError("tpu_topology is not set with accelerator: tpu: write it as 2x2x1")
        chips = hosts * s.whole("chips_per_host")
        if chips != s.chips:
            raise RecipeError(
                f"tpu_topology {s.text('tpu_topology')} has {s.chips} chips, but hosts x"
                f" chips_per_host is {chips}: make them equal"
            )
    elif s.text("tpu_topology"):
        raise RecipeError("tpu_topology is set, but accelerator is cpu: remove it")
    reachable = layout == "separate" or not s.text("rollouts")
    if reachable and not s.text("tls_secret"):
        what = "layout is separate" if layout == "separate" else "rollouts is empty (ingest)"
        raise RecipeError(f"tls_secret is not set, but {what}: other hosts reach it only over mTLS")
    if bool(s.text("tls_secret")) != bool(s.text("token_secret")):
        raise RecipeError("tls_secret and token_secret belong together: set both or none")
    if hosts > 1 and not s.text("shared_class"):
        raise RecipeError(
            f"shared_class is not set with {hosts} hosts: every host needs the volume"
        )
