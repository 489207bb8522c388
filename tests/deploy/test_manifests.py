"""Rendered manifests: strict schemas, offline; and what keeps a long run alive."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path

import pytest
import yaml

from orchestrator.recipes.launch import INTERRUPTED
from orchestrator.recipes.main import main
from orchestrator.recipes.manifests import Json, Object, manifests
from orchestrator.recipes.plain import compose, systemd
from orchestrator.recipes.render import yaml_text
from orchestrator.recipes.resolve import Settings
from tests.deploy.recipes import IMAGES, ROOT, SHIPPED, demo, on_tpu, shipped

jsonschema = pytest.importorskip("jsonschema", reason="strict validation needs the extra [dev]")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

KUBERNETES = "1.35"
SCHEMAS = ROOT / "deploy" / "schemas"
OURS = {"JobSet": "jobset.schema.json", "PodMonitor": "podmonitor.schema.json"}

SEPARATE = {
    "layout": "separate",
    "tls_secret": "tls",
    "token_secret": "tokens",
    "rollouts": "",
    "queue": "q",
}
EVERY = {
    **{name: lambda name=name: shipped(name) for name in SHIPPED},
    "separate-cpu": lambda: demo(**SEPARATE),
    "one-pod-ingest": lambda: demo(rollouts="", tls_secret="tls", token_secret="tokens"),
    "one-host-tpu": on_tpu,
}


def rendered(settings: Settings) -> list[Object]:
    """As a cluster would read them: through YAML."""
    return list(yaml.safe_load_all(yaml_text(manifests(settings))))


def validate(document: Mapping[str, Json]) -> None:
    """Strict: an unknown field is an error. Raises a validation error."""
    ours = OURS.get(str(document["kind"]))
    if ours is None:
        kubernetes_validate.validate(dict(document), KUBERNETES, strict=True)
        return
    schema = json.loads((SCHEMAS / ours).read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    if document["kind"] == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            whole = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "x"},
                "spec": job["template"]["spec"],
            }
            kubernetes_validate.validate(whole, KUBERNETES, strict=True)


def job_set(settings: Settings) -> Object:
    return next(item for item in rendered(settings) if item["kind"] == "JobSet")


def pods(document: Object) -> Iterator[tuple[Object, Object]]:
    """(job spec, pod spec) of each replicated job."""
    for job in document["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        yield spec, spec["template"]["spec"]


def containers(document: Object) -> Iterator[Object]:
    for _, pod in pods(document):
        yield from pod["containers"]
        yield from pod.get("initContainers", [])


@pytest.fixture(params=EVERY, name="settings")
def _settings(request: pytest.FixtureRequest) -> Settings:
    made: Settings = EVERY[request.param]()
    return made


def test_every_object_passes_its_strict_schema(settings: Settings) -> None:
    documents = rendered(settings)
    assert [document["kind"] for document in documents][-1] == "JobSet"
    for document in documents:
        validate(document)


def _typo_in_job_set(document: Object) -> None:
    policy = document["spec"]["failurePolicy"]
    policy["maxRestart"] = policy.pop("maxRestarts")


def _typo_in_pod(document: Object) -> None:
    for _, pod in pods(document):
        pod["terminationGracePeriodSecond"] = pod.pop("terminationGracePeriodSeconds")


def _typo_in_container(document: Object) -> None:
    for container in containers(document):
        context = container["securityContext"]
        context["readOnlyRootFileSystem"] = context.pop("readOnlyRootFilesystem")


def _typo_in_probe(document: Object) -> None:
    for container in containers(document):
        container["startupProbe"]["failureTreshold"] = 3


def _wrong_strategy(document: Object) -> None:
    document["spec"]["failurePolicy"]["restartStrategy"] = "Recreate"


def _text_for_a_number(document: Object) -> None:
    for spec, _ in pods(document):
        spec["backoffLimit"] = "0"


@pytest.mark.parametrize(
    "plant",
    [
        _typo_in_job_set,
        _typo_in_pod,
        _typo_in_container,
        _typo_in_probe,
        _wrong_strategy,
        _text_for_a_number,
    ],
)
def test_a_planted_typo_is_caught(plant: Callable[[Object], None]) -> None:
    document = job_set(shipped("gbs1024-submission"))
    validate(document)
    broken = copy.deepcopy(document)
    plant(broken)
    assert broken != document
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(broken)


def test_a_planted_typo_in_the_other_kinds_is_caught() -> None:
    for document in rendered(shipped("gbs1024-submission")):
        spec = document["spec"]
        assert isinstance(spec, dict)
        broken = {**document, "spec": {**spec, "podSelectr": {}}}
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(broken)


def test_check_jsonschema_reads_our_schemas(tmp_path: Path) -> None:
    """The command that the page on deployment names, on a good and a broken file."""
    document = job_set(demo())
    good, broken = tmp_path / "good.yaml", tmp_path / "broken.yaml"
    good.write_text(yaml.safe_dump(document))
    _typo_in_job_set(document)
    broken.write_text(yaml.safe_dump(document))
    schema = SCHEMAS / OURS["JobSet"]
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(schema)]
    assert subprocess.run([*command, str(good)], capture_output=True).returncode == 0
    assert subprocess.run([*command, str(broken)], capture_output=True).returncode == 1


# -- what keeps a run alive ----------------------------------------------------------------------


def test_r20_restarts_are_counted_and_no_new_pod_runs_beside_an_old_one(
    settings: Settings,
) -> None:
    policy = job_set(settings)["spec"]["failurePolicy"]
    assert policy["maxRestarts"] >= 1
    assert policy["restartStrategy"] == "BlockingRecreate"


def test_a_preemption_restarts_the_set_without_counting(settings: Settings) -> None:
    document = job_set(settings)
    (rule,) = document["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    for spec, pod in pods(document):
        assert spec["backoffLimit"] == 0
        assert pod["restartPolicy"] == "Never"  # A pod failure policy needs it.
        assert spec["podFailurePolicy"]["rules"] == [
            {
                "action": "FailJob",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            }
        ]


def test_a_preempted_pod_does_not_count_as_a_finished_run(settings: Settings) -> None:
    """A pod that exits 0 after SIGTERM has succeeded, and with it the set."""
    for container in containers(job_set(settings)):
        assert f"--interrupted_exit_code={INTERRUPTED}" in container["args"]
    assert INTERRUPTED != 0


def test_r26_the_startup_probe_covers_the_compile(settings: Settings) -> None:
    for container in containers(job_set(settings)):
        probe = container["startupProbe"]
        seconds = probe["periodSeconds"] * probe["failureThreshold"]
        assert seconds >= settings.number("compile_budget_s")
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert "initialDelaySeconds" not in container[name]


@pytest.mark.parametrize("budget", ["1", "9.5", "10", "11", "3600", "7200"])
def test_r16_the_start_is_bounded_by_its_own_budget(budget: str) -> None:
    made = job_set(demo(compile_budget_s=budget))
    for container in containers(made):
        probe = container["startupProbe"]
        seconds = probe["periodSeconds"] * probe["failureThreshold"]
        assert float(budget) <= seconds <= float(budget) + 80


def test_r24_r25_liveness_asks_a_process_of_its_own_and_tolerates_a_stall(
    settings: Settings,
) -> None:
    for container in containers(job_set(settings)):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probe = container["livenessProbe"]
        assert probe["timeoutSeconds"] >= 5
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 60
        port = ports[probe["httpGet"]["port"]]
        assert f"--probe_listen=0.0.0.0:{port}" in container["args"]


def test_r21_programs_are_started_directly(settings: Settings) -> None:
    both = {"orchestrator": ["orchestrator"], "worker": ["trainer_worker"]}
    for container in containers(job_set(settings)):
        assert container["command"] == both[str(container["name"])]
        assert all(str(word).startswith("--") for word in container["args"])
        assert not any(shell in str(container["command"]) for shell in ("sh", "bash -c", "exec "))


def test_the_grace_holds_a_micro_batch_and_a_checkpoint(settings: Settings) -> None:
    need = settings.number("longest_micro_batch_s") + settings.number("checkpoint_s")
    document = job_set(settings)
    for _, pod in pods(document):
        assert pod["terminationGracePeriodSeconds"] >= need
        for container in pod["containers"]:
            (given,) = [
                float(str(word).partition("=")[2])
                for word in container["args"]
                if str(word).startswith("--grace_s=")
            ]
            assert need <= given < pod["terminationGracePeriodSeconds"]


def test_r18_the_run_is_over_when_the_orchestrator_is(settings: Settings) -> None:
    document = job_set(settings)
    assert document["spec"]["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": ["orchestrator"],
    }
    for job in document["spec"]["replicatedJobs"]:
        # The worker is not "ready" until the orchestrator has asked for the compile.
        assert "dependsOn" not in job


def test_pods_are_confined(settings: Settings) -> None:
    document = job_set(settings)
    for _, pod in pods(document):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] != 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert not any("hostPath" in volume for volume in pod["volumes"])
    for container in containers(document):
        own = container["securityContext"]
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "@sha256:" in str(container["image"])


def test_nothing_listens_for_other_hosts_without_certificates(settings: Settings) -> None:
    for container in containers(job_set(settings)):
        words = [str(word) for word in container["args"]]
        wide = [word for word in words if word.startswith("--listen=0.0.0.0")]
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        if wide:
            assert "--tls_dir=/etc/prestage/tls" in words
            assert "--token_dir=/etc/prestage/tokens" in words
        for name in {"tls", "tokens"} & set(mounts):
            assert mounts[name]["readOnly"] is True
        assert not any("insecure" in word for word in words)
        # gRPC health and its reflection stay on loopback or the unix socket.
        (health,) = [word for word in words if word.startswith("--health_listen=")]
        assert "127.0.0.1" in health or "unix://" in health


def test_no_secret_is_in_a_command_line_or_the_environment(settings: Settings) -> None:
    for container in containers(job_set(settings)):
        for variable in container["env"]:
            assert "TOKEN" not in variable["name"]
        assert not any(str(word).startswith("--token=") for word in container["args"])


def test_each_port_that_is_open_to_others_has_a_policy(settings: Settings) -> None:
    policies = [item for item in rendered(settings) if item["kind"] == "NetworkPolicy"]
    roles = {
        pod["metadata"]["labels"]["prestage.dev/role"]
        for pod in (spec["template"] for spec, _ in pods(job_set(settings)))
    }
    selected = {
        policy["spec"]["podSelector"]["matchLabels"]["prestage.dev/role"] for policy in policies
    }
    assert selected == roles
    for policy in policies:
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        for rule in spec["ingress"]:
            assert rule["from"], "an empty source would let everyone in"


def test_kueue_and_prometheus_find_the_run() -> None:
    documents = rendered(shipped("gbs1024-submission"))
    (monitor,) = [item for item in documents if item["kind"] == "PodMonitor"]
    document = documents[-1]
    labels = document["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "tpu-v7x"
    scraped = {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]}
    open_ports = {port["name"] for container in containers(document) for port in container["ports"]}
    assert scraped <= open_ports
    run = monitor["spec"]["selector"]["matchLabels"]
    for spec, _ in pods(document):
        assert run.items() <= spec["template"]["metadata"]["labels"].items()
    assert "kueue.x-k8s.io/queue-name" not in json.dumps(rendered(demo()))


def test_several_hosts_are_one_job_on_one_slice() -> None:
    settings = shipped("gbs1024-submission")
    document = job_set(settings)
    (worker, pod), _ = pods(document)
    assert worker["completions"] == worker["parallelism"] == 32
    assert worker["completionMode"] == "Indexed"
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["google.com/tpu"] == "4"
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4x8"
    annotations = document["metadata"]["annotations"]
    assert "alpha.jobset.sigs.k8s.io/exclusive-topology" in annotations
    (orchestrator,) = list(pods(document))[1][1]["containers"]
    # <set>-<job>-<job index>-<pod index>.<subdomain>: the leader is pod 0.
    assert "--trainer=gbs1024-worker-0-0.gbs1024:7443" in orchestrator["args"]


def test_one_pod_shares_socket_memory_and_user() -> None:
    document = job_set(demo())
    ((_, pod),) = pods(document)
    (worker,) = pod["initContainers"]
    assert worker["restartPolicy"] == "Always"
    assert "runAsUser" not in worker["securityContext"]
    for path in ("/run/prestage", "/dev/shm"):
        for container in containers(document):
            assert path in {mount["mountPath"] for mount in container["volumeMounts"]}


# -- one host without Kubernetes -----------------------------------------------------------------


def test_the_compose_file_passes_the_compose_schema(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(yaml_text([compose(shipped("cpu"))]))
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    path.write_text(path.read_text().replace("stop_grace_period", "stop_grace_periods", 1))
    assert subprocess.run(command, capture_output=True).returncode == 1


def test_the_compose_services_are_confined_and_share_what_they_must() -> None:
    document = yaml.safe_load(yaml_text([compose(shipped("cpu"))]))
    services = document["services"]
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "@sha256:" in service["image"]
        assert service["command"][0] in ("orchestrator", "trainer_worker")
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert services["orchestrator"]["ipc"] == "service:worker"
    assert services["worker"]["shm_size"] > shipped("cpu").whole("shared_memory_bytes")


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    try:
        version = subprocess.run(["systemd-analyze", "--version"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("systemd-analyze is not installed")
    assert version.returncode == 0
    units = systemd(shipped("cpu"))
    for name, text in units.items():
        for program in ("orchestrator", "trainer_worker"):
            text = text.replace(f"/opt/prestage/bin/{program}", "/bin/true")
        (tmp_path / name).write_text(text)
    command = ["systemd-analyze", "verify", *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "prestage-" in line]
    assert ours == [], done.stderr


def test_systemd_waits_for_the_grace_and_ends_python_itself() -> None:
    settings = shipped("cpu")
    for text in systemd(settings).values():
        assert f"TimeoutStopSec={settings.number('grace_s'):g}" in text
        assert "KillSignal=SIGTERM" in text
        assert "ExecStart=/opt/prestage/bin/" in text
        assert "--interrupted_exit_code" not in text  # 0 means "stopped as asked" here.


def test_a_percent_sign_survives_systemd_and_a_dollar_compose() -> None:
    settings = demo(rollouts="/data/100%/$HOME.parquet")
    unit = systemd(settings)["prestage-demo-orchestrator.service"]
    assert '"--rollouts=/data/100%%/$$HOME.parquet"' in unit
    services = compose(settings)["services"]
    assert "--rollouts=/data/100%/$$HOME.parquet" in services["orchestrator"]["command"]


def test_kubernetes_does_not_expand_values() -> None:
    """`$(NAME)` in args would be replaced by Kubernetes."""
    document = job_set(demo(rollouts="/data/$(HOSTNAME).parquet"))
    words = [word for container in containers(document) for word in container["args"]]
    assert "--rollouts=/data/$$(HOSTNAME).parquet" in words


def test_the_packaged_schemas_are_there() -> None:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    assert any(KUBERNETES in entry.name for entry in folder.iterdir())


def test_main_prints_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "deploy" / "recipes" / "cpu.yaml"
    images = [f"--set={name}={image}" for name, image in IMAGES.items()]
    assert main([f"--recipe={recipe}", "--dry_run", *images]) == 0
    assert "kind: JobSet" in capsys.readouterr().out
