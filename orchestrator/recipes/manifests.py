"""Kubernetes manifests from settings: JobSet, volumes, NetworkPolicies, PodMonitor. Pure.

Every container starts its program directly (no shell), so that Python gets SIGTERM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from orchestrator.recipes import launch as at
from orchestrator.recipes.launch import Launch, Program, Site, launch
from orchestrator.recipes.resolve import STATE_DIR, Settings

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Object: TypeAlias = dict[str, Json]

USER: Final = 65532
"""One user for both programs: a unix socket and shared memory are the user's own (mode 0600)."""
PROBE_PERIOD_S: Final = 10
LABEL: Final = "prestage.dev/run"
ROLE: Final = "prestage.dev/role"
_MOUNTS: Final = (
    ("run", at.RUN_DIR),
    ("tmp", "/tmp"),
    ("shm", "/dev/shm"),
)


def site_of(s: Settings) -> Site:
    """Addresses in the cluster."""
    if s.text("layout") == "one-pod":
        address = f"unix://{at.RUN_DIR}/worker.sock"
        return Site(trainer=address, worker_listen=address, reachable=True, in_a_job=True)
    name = s.text("name")
    # JobSet's own names: <set>-<job>-<job index>-<pod index>.<subdomain>. Pod 0 leads.
    leader = f"{name}-worker-0-0.{name}"
    return Site(
        trainer=f"{leader}:{at.WORKER_PORT}",
        worker_listen=f"0.0.0.0:{at.WORKER_PORT}",
        coordinator=f"{leader}:{at.COORDINATOR_PORT}" if s.whole("hosts") > 1 else "",
        reachable=True,
        in_a_job=True,
    )


def manifests(s: Settings) -> list[Object]:
    """All objects, in the order to apply them."""
    both = launch(s, site_of(s))
    objects = [_claim(s, "orchestrator", s.text("state_class"), "ReadWriteOnce")]
    if s.text("layout") == "separate":
        many = s.whole("hosts") > 1
        kind = s.text("shared_class") if many else s.text("state_class")
        objects.append(_claim(s, "worker", kind, "ReadWriteMany" if many else "ReadWriteOnce"))
    objects += _policies(s)
    objects.append(_monitor(s))
    objects.append(_job_set(s, both))
    return objects


def _strings(items: Mapping[str, str]) -> Object:
    return dict(items)


def _meta(s: Settings, suffix: str = "", labels: Mapping[str, str] | None = None) -> Object:
    name = s.text("name") + (f"-{suffix}" if suffix else "")
    marks: Object = {
        "app.kubernetes.io/name": "prestage",
        LABEL: s.text("name"),
        **_strings(labels or {}),
    }
    return {"name": name, "namespace": s.text("namespace"), "labels": marks}


# -- volumes --------------------------------------------------------------------------------------


def _claim(s: Settings, role: str, storage_class: str, mode: str) -> Object:
    spec: Object = {
        "accessModes": [mode],
        "resources": {"requests": {"storage": s.text("state_size")}},
    }
    if storage_class:
        spec["storageClassName"] = storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _meta(s, f"{role}-state"),
        "spec": spec,
    }


def _volumes(s: Settings, role: str) -> list[Json]:
    """A pod's volumes. In one pod, the orchestrator's serve both programs."""
    memory: Object = {"medium": "Memory"}
    shared = s.whole("shared_memory_bytes")
    if s.text("layout") == "one-pod" and shared:
        memory["sizeLimit"] = f"{math.ceil(shared * 1.25 / (1 << 20))}Mi"
    volumes: list[Json] = [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": memory},
        {
            "name": "state",
            "persistentVolumeClaim": {"claimName": f"{s.text('name')}-{role}-state"},
        },
    ]
    for name, key in (("tls", "tls_secret"), ("tokens", "token_secret")):
        if at.serves_tls(s, role):
            volumes.append(
                {"name": name, "secret": {"secretName": s.text(key), "defaultMode": 0o440}}
            )
    return volumes


def _mounts(s: Settings, role: str) -> list[Json]:
    mounts: list[Json] = [{"name": name, "mountPath": path} for name, path in _MOUNTS]
    mounts.append({"name": "state", "mountPath": STATE_DIR})
    for name, path in (("tls", at.TLS_DIR), ("tokens", at.TOKEN_DIR)):
        if at.serves_tls(s, role):
            mounts.append({"name": name, "mountPath": path, "readOnly": True})
    return mounts


# -- containers -----------------------------------------------------------------------------------


def _probe(port: str, path: str, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": PROBE_PERIOD_S,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _unexpanded(text: str) -> str:
    """Kubernetes replaces `$(NAME)` in arguments and variables."""
    return text.replace("$(", "$$(")


def _container(s: Settings, role: str, program: Program, ports: Mapping[str, int]) -> Object:
    """One container. Its probes ask a small process of their own, never the trainer's threads."""
    probe = f"{role[:6]}-probe"
    # The orchestrator waits for the worker's start before its own is over.
    budget = s.number("compile_budget_s") + (0 if role == "worker" else 60)
    resources: Object = {
        "requests": {"cpu": s.text(f"{role}_cpu"), "memory": s.text(f"{role}_memory")},
        "limits": {"memory": s.text(f"{role}_memory")},
    }
    if role == "worker" and s.text("accelerator") == "tpu":
        chips = str(s.whole("chips_per_host"))
        resources = {
            "requests": {**_object(resources["requests"]), "google.com/tpu": chips},
            "limits": {**_object(resources["limits"]), "google.com/tpu": chips},
        }
    return {
        "name": role,
        "image": s.text(f"{role}_image"),
        "imagePullPolicy": "IfNotPresent",
        "command": [program.argv[0]],
        "args": [_unexpanded(word) for word in program.argv[1:]],
        "env": [
            {"name": name, "value": _unexpanded(value)}
            for name, value in program.environment.items()
        ],
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
        ],
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "startupProbe": _probe(probe, "/startupz", math.ceil(budget / PROBE_PERIOD_S)),
        "readinessProbe": _probe(probe, "/readyz", 3),
        "livenessProbe": _probe(probe, "/livez", 6),
        "volumeMounts": _mounts(s, role),
    }


def _object(value: Json) -> Object:
    assert isinstance(value, dict)
    return value


def _orchestrator(s: Settings, program: Program) -> Object:
    ports = {"orches-probe": at.ORCHESTRATOR_PROBE_PORT, "metrics": at.ORCHESTRATOR_METRICS_PORT}
    if not s.text("rollouts"):
        ports["ingest"] = at.INGEST_PORT
    return _container(s, "orchestrator", program, ports)


def _worker(s: Settings, program: Program) -> Object:
    ports = {"worker-probe": at.WORKER_PROBE_PORT, "worker-metrics": at.WORKER_METRICS_PORT}
    if s.text("layout") == "separate":
        ports["trainer"] = at.WORKER_PORT
    return _container(s, "worker", program, ports)


# -- pods and jobs --------------------------------------------------------------------------------


def _pod(s: Settings, role: str, containers: Object, *, on_tpu: bool) -> Object:
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(s.number("grace_s")),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **containers,
        "volumes": _volumes(s, role),
    }
    if on_tpu:
        spec["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": s.text("tpu_type"),
            "cloud.google.com/gke-tpu-topology": s.text("tpu_topology"),
        }
        spec["tolerations"] = [
            {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
    labels: Object = {LABEL: s.text("name"), ROLE: role, "app.kubernetes.io/name": "prestage"}
    return {"metadata": {"labels": labels}, "spec": spec}


def _job(name: str, pods: int, pod: Object) -> Object:
    """A job of the set. No retry of its own: the set restarts as a whole, from its checkpoint."""
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": pods,
                "completions": pods,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "podFailurePolicy": {
                    "rules": [
                        {
                            "action": "FailJob",
                            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                        }
                    ]
                },
                "template": pod,
            }
        },
    }


def _job_set(s: Settings, both: Launch) -> Object:
    tpu = s.text("accelerator") == "tpu"
    orchestrator = _orchestrator(s, both.orchestrator)
    worker = _worker(s, both.worker)
    jobs: list[Json]
    if s.text("layout") == "one-pod":
        # A sidecar: starts first, is restarted alone, and ends after the orchestrator.
        sidecar: Object = {**worker, "restartPolicy": "Always"}
        containers: Object = {"initContainers": [sidecar], "containers": [orchestrator]}
        pod = _pod(s, "orchestrator", containers, on_tpu=tpu)
        jobs = [_job("orchestrator", 1, pod)]
    else:
        jobs = [
            _job(
                "worker",
                s.whole("hosts"),
                _pod(s, "worker", {"containers": [worker]}, on_tpu=tpu),
            ),
            _job(
                "orchestrator",
                1,
                _pod(s, "orchestrator", {"containers": [orchestrator]}, on_tpu=False),
            ),
        ]
    meta = _meta(
        s, labels={"kueue.x-k8s.io/queue-name": s.text("queue")} if s.text("queue") else {}
    )
    if tpu and s.whole("hosts") > 1:
        meta["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": meta,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": s.text("name")},
            # The run is over when the orchestrator is; the worker serves until it is told to end.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["orchestrator"]},
            "failurePolicy": {
                "maxRestarts": s.whole("max_restarts"),
                # No new pod beside an old one that may still talk to the worker.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "preempted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": jobs,
        },
    }


# -- network and metrics --------------------------------------------------------------------------


def _tcp(*ports: int) -> list[Json]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _from_role(s: Settings, role: str) -> Json:
    return {"podSelector": {"matchLabels": {LABEL: s.text("name"), ROLE: role}}}


def _policy(s: Settings, role: str, ingress: Sequence[Json], egress: Sequence[Json]) -> Object:
    labels: Object = {LABEL: s.text("name"), ROLE: role}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(s, role),
        "spec": {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": list(ingress),
            "egress": list(egress),
        },
    }


def _policies(s: Settings) -> list[Object]:
    """Everything else is denied. A node's own probes always pass."""
    dns: Object = {
        "to": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
        ],
        "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
    }
    # Checkpoints in object storage, and the metadata server that gives their credentials.
    remote = any("://" in s.text(key) for key in ("checkpoint_dir", "rollouts"))
    storage: list[Json] = [dns, {"ports": _tcp(443, 80, 988)}] if remote else []
    scrape: Object = {
        "namespaceSelector": {
            "matchLabels": {"kubernetes.io/metadata.name": s.text("monitoring_namespace")}
        }
    }
    one_pod = s.text("layout") == "one-pod"
    scraped = [at.ORCHESTRATOR_METRICS_PORT, *([at.WORKER_METRICS_PORT] if one_pod else [])]
    ingress: list[Json] = [{"from": [scrape], "ports": _tcp(*scraped)}]
    if not s.text("rollouts"):
        ingress.append({"from": [_from_role(s, "producer")], "ports": _tcp(at.INGEST_PORT)})
    if one_pod:
        return [_policy(s, "orchestrator", ingress, storage)]
    to_worker: Object = {"to": [_from_role(s, "worker")], "ports": _tcp(at.WORKER_PORT)}
    among: list[Json] = [_from_role(s, "worker")]
    return [
        _policy(s, "orchestrator", ingress, [to_worker, *(storage or [dns])]),
        _policy(
            s,
            "worker",
            [
                {"from": [_from_role(s, "orchestrator")], "ports": _tcp(at.WORKER_PORT)},
                {"from": [scrape], "ports": _tcp(at.WORKER_METRICS_PORT)},
                {"from": among},  # The hosts' own collectives choose their ports.
            ],
            [{"to": among}, *(storage or [dns])],
        ),
    ]


def _monitor(s: Settings) -> Object:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _meta(s),
        "spec": {
            "selector": {"matchLabels": {LABEL: s.text("name")}},
            "podTargetLabels": [LABEL, ROLE],
            "podMetricsEndpoints": [
                {"port": port, "path": "/metrics", "interval": "15s"}
                for port in ("metrics", "worker-metrics")
            ],
        },
    }
