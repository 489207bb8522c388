"""One rule of precedence for every key; contradictions are refused before anything is rendered."""

from __future__ import annotations

import pytest

from orchestrator.recipes.keys import KEYS, TUNED_LIBTPU, TUNED_MAXTEXT, TUNED_PRECISION
from orchestrator.recipes.launch import launch, maxtext_settings
from orchestrator.recipes.manifests import site_of
from orchestrator.recipes.resolve import Origin, Settings, resolve
from orchestrator.recipes.values import Kind, RecipeError, parse_value, value_text
from tests.deploy.recipes import SMALLEST, TPU, demo, on_tpu, shipped

EXACT_KEYS = [
    "TRAINER_TUNED_FLAGS",
    "RAGGED_BUFFER_FACTOR",
    "RETRY_WHEN_TOKENS_DROPPED",
    "LOGPS_SHARDED_HEAD",
    "COMPUTE_LOGPS_CHUNK_SIZE",
    "NUM_MOE_TOKEN_CHUNKS",
    "REMAT_CONTEXT",
    "REMAT_POLICY",
    "MOE_EXCLUDE_PADDING",
    "LOG_MOE_DROPS",
    "MAXTEXT_EXTRA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "RETURN_ROUTED_EXPERTS",
    "PIPELINE_STEP_BOUNDARY",
    "STAGE_NEXT_MICROBATCH",
    "stage_before_update",
    "dispatch_before_metrics",
    "rollouts",
    "num_steps",
    "rows",
    "tokens_per_row",
    "groups_per_batch",
    "group_size",
    "num_minibatches",
    "num_iterations",
    "old_logprobs",
    "checkpoint_every",
    "weight_sync_every",
    "eval_every",
    "eval_rollouts",
    "val_start_step",
    "require_drop_audit",
    "engine",
    "trainer_factory",
    "preset",
    "max_inflight",
    "staging_memory_bytes",
    "store_memory_bytes",
    "shared_memory_bytes",
    "checkpoint_dir",
    "name",
    "orchestrator_image",
    "worker_image",
    "accelerator",
    "tpu_type",
    "tpu_topology",
    "hosts",
    "chips_per_host",
    "layout",
    "namespace",
    "queue",
    "max_restarts",
    "compile_budget_s",
    "longest_micro_batch_s",
    "checkpoint_s",
    "grace_s",
    "worker_cpu",
    "worker_memory",
    "orchestrator_cpu",
    "orchestrator_memory",
    "state_size",
    "state_class",
    "shared_class",
    "tls_secret",
    "token_secret",
    "monitoring_namespace",
]


def test_the_key_set_is_exactly_this() -> None:
    assert list(KEYS) == EXACT_KEYS


@pytest.mark.parametrize("name", ["RAGGED_BUFER_FACTOR", "trainer_tuned_flags", "NAME", "", "x y"])
def test_an_unknown_key_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="unknown key"):
        resolve({**SMALLEST, name: "1"}, {})
    with pytest.raises(RecipeError, match="unknown key"):
        resolve(SMALLEST, {name: "1"})


def test_a_misspelt_key_names_the_right_one() -> None:
    with pytest.raises(RecipeError, match="did you mean RAGGED_BUFFER_FACTOR"):
        demo({"RAGGED_BUFER_FACTOR": "-1"})
    with pytest.raises(RecipeError, match="did you mean TRAINER_TUNED_FLAGS"):
        demo({"trainer_tuned_flags": "true"})


# -- precedence ----------------------------------------------------------------------------------

# Two explicit values of each key that are legal together with the rest of `CLEAN`.
CLEAN = {
    **TPU,
    "PIPELINE_STEP_BOUNDARY": "true",
    "STAGE_NEXT_MICROBATCH": "on",
    "RETRY_WHEN_TOKENS_DROPPED": "true",
    "LOG_MOE_DROPS": "true",
    "tls_secret": "tls",
    "token_secret": "tokens",
    "checkpoint_dir": "/var/lib/prestage/c",
    "checkpoint_s": "1",
    "longest_micro_batch_s": "1",
    "shared_class": "files",
    "grace_s": "500",
    "compile_budget_s": "10",
    "eval_rollouts": "/e.parquet",
}
PAIRS = {
    "accelerator": None,  # Other keys follow it: see the placement tests.
    "engine": None,
    "hosts": None,
    "chips_per_host": None,
    "tpu_topology": None,
    "PIPELINE_STEP_BOUNDARY": None,
    "RETRY_WHEN_TOKENS_DROPPED": ("true", "True"),
    "LOG_MOE_DROPS": ("true", "false"),
    "require_drop_audit": ("true", "false"),
    "STAGE_NEXT_MICROBATCH": ("off", "auto"),
    "TRAINER_TUNED_FLAGS": ("true", "false"),
    "RAGGED_BUFFER_FACTOR": ("2.75", "-1"),
    "REMAT_CONTEXT": ("device", "remat"),
    "REMAT_POLICY": ("minimal", "custom"),
    "old_logprobs": ("sampler", "current"),
    "layout": ("separate", "one-pod"),
    "preset": None,
    "LOGPS_SHARDED_HEAD": ("vocab", "local"),
    "tpu_type": ("tpu-v6e", "tpu7x"),
    "checkpoint_dir": ("/var/lib/prestage/a", "gs://b/c"),
    "rollouts": ("/a.parquet", "/b.parquet"),
    "dispatch_before_metrics": ("true", "false"),
    "grace_s": ("100", "200"),
}
OF_KIND = {
    Kind.SWITCH: ("true", "false"),
    Kind.WHOLE: ("7", "5"),
    Kind.NUMBER: ("70", "50"),
    Kind.TEXT: ("one", "two"),
    Kind.NAME: ("one", "two"),
    Kind.IMAGE: (f"r/a@sha256:{'a' * 64}", f"r/b@sha256:{'b' * 64}"),
    Kind.QUANTITY: ("3", "6Gi"),
    Kind.PAIRS: ("a=1", "a=2"),
}
BOTH_WAYS = [name for name in KEYS if PAIRS.get(name, ()) is not None]


def _two(name: str) -> tuple[str, str]:
    return PAIRS.get(name) or OF_KIND[KEYS[name].kind]


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_caller_over_recipe_over_default_for_every_key(name: str) -> None:
    one, two = _two(name)
    key = KEYS[name]
    base = {known: text for known, text in CLEAN.items() if known != name}

    def value(text: str) -> object:
        return parse_value(name, key.kind, text, least=key.least)

    def of(settings: Settings) -> object:
        if key.kind is Kind.PAIRS:
            return tuple(pair for pair in settings.pairs(name) if pair[0] == "a")
        return settings.values[name]

    recipe = resolve({**base, name: one}, {})
    assert of(recipe) == value(one)
    assert recipe.origins[name] is Origin.RECIPE
    for first, second in ((one, two), (two, one)):
        caller = resolve({**base, name: first}, {name: second})
        assert of(caller) == value(second)
        assert caller.origins[name] is Origin.CALLER
        said = any(note.startswith(name) and "caller" in note for note in caller.notes)
        assert said is (value(first) != value(second)), caller.notes


def test_a_value_said_twice_alike_is_no_conflict() -> None:
    assert demo({"rows": "4"}, rows="4").notes == ()


def test_evaluations_need_rollouts_and_both_are_rendered() -> None:
    with pytest.raises(RecipeError, match="eval_every is 5 without eval_rollouts"):
        demo(eval_every="5")
    settings = demo(eval_every="5", eval_rollouts="/e.parquet")
    argv = launch(settings, site_of(settings)).orchestrator.argv
    assert {"--eval_every=5", "--eval_rollouts=/e.parquet"} <= set(argv)
    settings = demo(eval_rollouts="/e.parquet")
    argv = launch(settings, site_of(settings)).orchestrator.argv
    assert not any(word.startswith("--eval_rollouts") for word in argv)


def test_the_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = demo()
    for name in KEYS:
        monkeypatch.setenv(name, "true")
    assert demo() == before


# -- the tuned settings --------------------------------------------------------------------------


def test_the_tuned_set_is_exactly_this() -> None:
    assert dict(TUNED_LIBTPU) == {"xla_tpu_enable_offloading_copy_to_sparsecore": "false"}
    off = dict(maxtext_settings(on_tpu()))
    on = dict(maxtext_settings(on_tpu(TRAINER_TUNED_FLAGS="true")))
    six = {
        "context_parallel_strategy": "all_gather",
        "sa_fuse_reciprocal": "true",
        "sa_use_base2_exp": "false",
        "gdn_cp_mode": "seq",
        "gdn_cp_state": "device",
        "num_moe_token_chunks": "2",
    }
    two = {"gdn_cp_matmul_precision": "high", "cast_grads_after_all_reduce": "true"}
    cell = {
        "ragged_buffer_factor": "2.75",
        "retry_when_tokens_dropped": "true",
        "context": "device",
        "moe_exclude_padding_from_routing": "true",
        "log_moe_drops": "true",
    }
    changed = {name: value for name, value in on.items() if off.get(name) != value}
    assert changed == {**six, **two, **cell}
    assert {*dict(TUNED_MAXTEXT), "num_moe_token_chunks"} == set(six)
    assert dict(TUNED_PRECISION) == two


def test_the_four_settings_that_failed_their_check_and_the_inert_one_are_never_set() -> None:
    left_out = {
        "prefuse_moe_weights",
        "moe_accumulate_wi_dlhs",
        "moe_accumulate_chunk_wgrad",
        "decoder_layer_input",
        "moe_route",
    }
    for tuned in ("true", "false"):
        for factor in ("-1", "2.75"):
            settings = on_tpu(
                TRAINER_TUNED_FLAGS=tuned,
                RAGGED_BUFFER_FACTOR=factor,
                RETRY_WHEN_TOKENS_DROPPED="true",
            )
            assert not left_out & set(dict(maxtext_settings(settings)))


CELL = ("RETRY_WHEN_TOKENS_DROPPED", "MOE_EXCLUDE_PADDING", "LOG_MOE_DROPS")


@pytest.mark.parametrize(
    ("tuned", "factor", "cell", "chunks", "context", "logp_chunk"),
    [
        ("false", None, False, 4, "offload", 512),
        ("true", None, True, 2, "device", 1024),
        ("true", "2.75", True, 2, "device", 1024),
        ("true", "3.5", True, 2, "device", 1024),
        ("true", "-1", False, 4, "offload", 1024),
        ("true", "-1.0", False, 4, "offload", 1024),
        ("false", "-1", False, 4, "offload", 512),
    ],
)
def test_follow_up_5_which_layouts_get_the_long_logprob_chunk_and_the_rest_of_the_cell(
    tuned: str, factor: str | None, cell: bool, chunks: int, context: str, logp_chunk: int
) -> None:
    caller = {} if factor is None else {"RAGGED_BUFFER_FACTOR": factor}
    settings = on_tpu(TRAINER_TUNED_FLAGS=tuned, **caller)
    assert [settings.switch(name) for name in CELL] == [cell] * 3
    assert settings.whole("NUM_MOE_TOKEN_CHUNKS") == chunks
    assert settings.text("REMAT_CONTEXT") == context
    assert settings.whole("COMPUTE_LOGPS_CHUNK_SIZE") == logp_chunk


@pytest.mark.parametrize("factor", ["-1", "2.75"])
def test_follow_up_5_a_retry_override_without_the_tuned_flags_adds_no_mask_and_no_audit(
    factor: str,
) -> None:
    settings = on_tpu(
        TRAINER_TUNED_FLAGS="false", RETRY_WHEN_TOKENS_DROPPED="true", RAGGED_BUFFER_FACTOR=factor
    )
    assert not settings.switch("MOE_EXCLUDE_PADDING")
    assert not settings.switch("LOG_MOE_DROPS")
    rendered = dict(maxtext_settings(settings))
    assert rendered["moe_exclude_padding_from_routing"] == "false"
    assert rendered["log_moe_drops"] == "false"
    assert not any(name.startswith(("sa_", "gdn_")) for name in rendered)


@pytest.mark.parametrize("layer", ["recipe", "caller"])
@pytest.mark.parametrize(
    ("setting", "value", "key"),
    [
        ("context_parallel_strategy", "ring", None),
        ("gdn_cp_matmul_precision", "highest", None),
        ("num_moe_token_chunks", "8", "NUM_MOE_TOKEN_CHUNKS"),
        ("context", "remat", "REMAT_CONTEXT"),
    ],
)
def test_follow_up_2_one_rule_for_tuned_settings_whoever_overrides_them_and_how(
    layer: str, setting: str, value: str, key: str | None
) -> None:
    given = {"MAXTEXT_EXTRA_FLAGS": f"{setting}={value}"}
    recipe, caller = (given, {}) if layer == "recipe" else ({}, given)
    settings = on_tpu({**recipe, "TRAINER_TUNED_FLAGS": "true"}, **caller)
    rendered = maxtext_settings(settings)
    assert [text for name, text in rendered if name == setting] == [value]
    assert any(f"{value} ({layer}) overrides" in note for note in settings.notes)
    assert any("TRAINER_TUNED_FLAGS implies" in note for note in settings.notes)
    if key is not None:  # The same through the setting's own key.
        own = {key: value}
        recipe, caller = (own, {}) if layer == "recipe" else ({}, own)
        again = on_tpu({**recipe, "TRAINER_TUNED_FLAGS": "true"}, **caller)
        assert maxtext_settings(again) == rendered
    assert dict(rendered)["sa_use_base2_exp"] == "false"  # The others stay.


@pytest.mark.parametrize("layer", ["recipe", "caller"])
def test_follow_up_2_the_same_rule_for_libtpu_flags(layer: str) -> None:
    given = {"LIBTPU_INIT_ARGS": "--xla_tpu_enable_offloading_copy_to_sparsecore=true --x=1"}
    recipe, caller = (given, {}) if layer == "recipe" else ({}, given)
    settings = on_tpu({**recipe, "TRAINER_TUNED_FLAGS": "true"}, **caller)
    env = launch(settings, site_of(settings)).worker.environment["LIBTPU_INIT_ARGS"]
    assert env.split() == ["--xla_tpu_enable_offloading_copy_to_sparsecore=true", "--x=1"]


def test_follow_up_2_a_callers_extra_settings_add_to_the_recipes() -> None:
    settings = on_tpu({"MAXTEXT_EXTRA_FLAGS": "a=1 b=2"}, MAXTEXT_EXTRA_FLAGS="b=3 c=4")
    assert dict(settings.pairs("MAXTEXT_EXTRA_FLAGS")) == {"a": "1", "b": "3", "c": "4"}
    assert len(settings.notes) == 1


def test_one_setting_under_two_names_in_one_place_is_refused() -> None:
    with pytest.raises(RecipeError, match="same setting"):
        on_tpu(NUM_MOE_TOKEN_CHUNKS="2", MAXTEXT_EXTRA_FLAGS="num_moe_token_chunks=4")
    settings = on_tpu(NUM_MOE_TOKEN_CHUNKS="4", MAXTEXT_EXTRA_FLAGS="num_moe_token_chunks=4")
    names = [name for name, _ in maxtext_settings(settings)]
    assert names.count("num_moe_token_chunks") == 1


def test_no_maxtext_setting_is_rendered_twice() -> None:
    names = [name for name, _ in maxtext_settings(shipped("gbs1024-submission"))]
    assert len(names) == len(set(names))


# -- contradictions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"RAGGED_BUFFER_FACTOR": "2.75"}, "without RETRY_WHEN_TOKENS_DROPPED"),
        (
            {"TRAINER_TUNED_FLAGS": "true", "RETRY_WHEN_TOKENS_DROPPED": "false"},
            "without RETRY_WHEN_TOKENS_DROPPED",
        ),
        ({"STAGE_NEXT_MICROBATCH": "true"}, "without PIPELINE_STEP_BOUNDARY"),
        ({"STAGE_NEXT_MICROBATCH": "auto"}, "without PIPELINE_STEP_BOUNDARY"),
        (
            {"PIPELINE_STEP_BOUNDARY": "0", "STAGE_NEXT_MICROBATCH": "1"},
            "without PIPELINE_STEP_BOUNDARY",
        ),
        ({"PIPELINE_STEP_BOUNDARY": "1", "old_logprobs": "trainer"}, "none could be staged"),
        ({"dispatch_before_metrics": "true"}, "dispatch_before_metrics"),
        ({"TRAINER_TUNED_FLAGS": "true", "REMAT_POLICY": "full"}, "REMAT_POLICY is full"),
        (
            {"MAXTEXT_EXTRA_FLAGS": "gdn_cp_state=device", "REMAT_POLICY": "full"},
            "gdn_cp_state=device",
        ),
        ({"REMAT_CONTEXT": "device", "REMAT_POLICY": "full"}, "REMAT_CONTEXT: device"),
        ({"val_start_step": "7"}, "needs the drop audit"),
        (
            {"TRAINER_TUNED_FLAGS": "true", "val_start_step": "7", "LOG_MOE_DROPS": "false"},
            "needs the drop audit",
        ),
        (
            {"TRAINER_TUNED_FLAGS": "true", "val_start_step": "7", "require_drop_audit": "no"},
            "in a scored run",
        ),
        ({"require_drop_audit": "true"}, "without LOG_MOE_DROPS"),
        ({"COMPUTE_LOGPS_CHUNK_SIZE": "0"}, "COMPUTE_LOGPS_CHUNK_SIZE is 0"),
        ({"checkpoint_every": "1"}, "without checkpoint_dir"),
        ({"checkpoint_dir": "/tmp/c"}, "would not outlive"),
        ({"grace_s": "129"}, "a shorter grace would kill"),
        ({"hosts": "2", "layout": "one-pod"}, "layout is one-pod with 2 hosts"),
        ({"hosts": "2"}, "chips"),
        ({"tpu_topology": "2x2x2"}, "8 chips"),
        ({"layout": "separate"}, "tls_secret is not set"),
        ({"rollouts": ""}, "tls_secret is not set"),
        ({"tls_secret": "t"}, "belong together"),
        ({"preset": "tiny"}, "presets are jax's"),
        ({"trainer_factory": ""}, "trainer_factory is not set, but engine is maxtext"),
        ({"engine": "jax", "TRAINER_TUNED_FLAGS": "true"}, "does not know it"),
        ({"engine": "jax", "REMAT_CONTEXT": "device"}, "does not know it"),
        ({"accelerator": "cpu", "tpu_topology": "2x2x1"}, "accelerator is cpu"),
        ({"num_steps": "0"}, "num_steps"),
        ({"max_restarts": "0"}, "max_restarts"),
        ({"REMAT_POLICY": "fulll"}, "use one of"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        on_tpu(changes)
    with pytest.raises(RecipeError, match=why):
        on_tpu(**changes)


def test_on_a_cpu_nothing_for_a_tpu_is_accepted() -> None:
    with pytest.raises(RecipeError, match="LIBTPU_INIT_ARGS is set, but accelerator is cpu"):
        demo(LIBTPU_INIT_ARGS="--a=1")


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.required])
def test_a_key_that_must_be_set_is_asked_for(name: str) -> None:
    with pytest.raises(RecipeError, match=f"^{name} is not set"):
        resolve({known: text for known, text in SMALLEST.items() if known != name}, {})


def test_follow_up_1_staging_is_asked_for_outright_so_that_a_worker_without_it_fails_at_start() -> (
    None
):
    """`on` makes the orchestrator refuse to start; only an explicit `auto` lets it run unstaged."""
    env = launch(*_with_site(demo(PIPELINE_STEP_BOUNDARY="1"))).orchestrator.environment
    assert env["STAGE_NEXT_MICROBATCH"] == "on"
    assert env["PIPELINE_STEP_BOUNDARY"] == "true"
    auto = demo(PIPELINE_STEP_BOUNDARY="1", STAGE_NEXT_MICROBATCH="AUTO")
    assert launch(*_with_site(auto)).orchestrator.environment["STAGE_NEXT_MICROBATCH"] == "auto"
    off = demo(PIPELINE_STEP_BOUNDARY="1", STAGE_NEXT_MICROBATCH="false")
    assert launch(*_with_site(off)).orchestrator.environment["STAGE_NEXT_MICROBATCH"] == "off"


def test_follow_up_3_a_scored_run_requires_the_drop_audit() -> None:
    settings = shipped("gbs1024-submission")
    both = launch(*_with_site(settings))
    assert settings.scored
    assert "--require_drop_audit" in both.orchestrator.argv
    assert "log_moe_drops=true" in both.worker.environment["MAXTEXT_EXTRA_FLAGS"].split()


def _with_site(settings: Settings) -> tuple[Settings, object]:
    return settings, site_of(settings)


def test_the_submission_recipe_has_the_documented_defaults_and_each_off_switch() -> None:
    on = shipped("gbs1024-submission")
    assert value_text(on.values["RAGGED_BUFFER_FACTOR"]) == "2.75"
    assert on.text("LOGPS_SHARDED_HEAD") == "local"
    assert on.text("STAGE_NEXT_MICROBATCH") == "on"
    assert on.whole("COMPUTE_LOGPS_CHUNK_SIZE") == 1024
    off = shipped(
        "gbs1024-submission",
        TRAINER_TUNED_FLAGS="false",
        LOGPS_SHARDED_HEAD="0",
        PIPELINE_STEP_BOUNDARY="False",
        val_start_step="0",
    )
    assert value_text(off.values["RAGGED_BUFFER_FACTOR"]) == "-1"
    assert off.text("LOGPS_SHARDED_HEAD") == "off"
    assert off.text("STAGE_NEXT_MICROBATCH") == "off"
    assert off.whole("COMPUTE_LOGPS_CHUNK_SIZE") == 512
    assert off.pairs("LIBTPU_INIT_ARGS") == ()
    pipelined = shipped("gbs1024-submission", STAGE_NEXT_MICROBATCH="false")
    assert pipelined.switch("PIPELINE_STEP_BOUNDARY")
    assert pipelined.text("STAGE_NEXT_MICROBATCH") == "off"


def test_the_head_is_the_workers_only() -> None:
    both = launch(*_with_site(shipped("gbs1024-submission")))
    assert "--logps_sharded_head=local" in both.worker.argv
    assert not any("sharded_head" in word for word in both.orchestrator.argv)


def test_legal_and_rarely_meant_is_noted() -> None:
    replay_off = on_tpu(TRAINER_TUNED_FLAGS="true", RETURN_ROUTED_EXPERTS="false")
    assert any("without router replay" in note for note in replay_off.notes)
    inert = demo(RETRY_WHEN_TOKENS_DROPPED="true")
    assert any("does nothing" in note for note in inert.notes)
