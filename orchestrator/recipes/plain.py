"""One host without Kubernetes: docker compose, or two systemd units. Pure."""

from __future__ import annotations

import math
from typing import Final

from orchestrator.recipes.launch import (
    INGEST_PORT,
    ORCHESTRATOR_METRICS_PORT,
    RUN_DIR,
    TLS_DIR,
    TOKEN_DIR,
    WORKER_METRICS_PORT,
    Program,
    Site,
    launch,
    serves_tls,
)
from orchestrator.recipes.manifests import USER, Json, Object
from orchestrator.recipes.resolve import STATE_DIR, Settings
from orchestrator.recipes.values import RecipeError

BIN_DIR: Final = "/opt/prestage/bin"


def _site(s: Settings, form: str) -> Site:
    if s.text("layout") != "one-pod":
        raise RecipeError(
            f"--form={form} is for one host, but layout is {s.text('layout')} with"
            f" {s.whole('hosts')} host(s): use --form=jobset, or layout: one-pod"
        )
    address = f"unix://{RUN_DIR}/worker.sock"
    # In a container, loopback is the container's own; compose publishes it on the host's.
    return Site(
        trainer=address,
        worker_listen=address,
        reachable=form == "compose",
        in_a_job=False,
    )


def _escaped(text: str) -> str:
    """Compose reads `$` as a variable."""
    return text.replace("$", "$$")


def _service(s: Settings, role: str, program: Program) -> Object:
    mounts: list[Json] = [
        {"type": "volume", "source": "run", "target": RUN_DIR},
        {"type": "volume", "source": "state", "target": STATE_DIR},
    ]
    for key, path in (("tls_secret", TLS_DIR), ("token_secret", TOKEN_DIR)):
        if serves_tls(s, role):
            mounts.append(
                {"type": "bind", "source": f"./{s.text(key)}", "target": path, "read_only": True}
            )
    return {
        "image": s.text(f"{role}_image"),
        "command": [_escaped(word) for word in program.argv],
        "entrypoint": [],
        "environment": {name: _escaped(value) for name, value in program.environment.items()},
        "user": f"{USER}:{USER}",
        "read_only": True,
        "tmpfs": [f"/tmp:uid={USER},gid={USER},mode=0700"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{math.ceil(s.number('grace_s'))}s",
        "mem_limit": s.text(f"{role}_memory").replace("Gi", "g").replace("Mi", "m"),
        "volumes": mounts,
        "logging": {"driver": "json-file", "options": {"max-size": "64m", "max-file": "4"}},
    }


def compose(s: Settings) -> Object:
    """A compose file. Raises `RecipeError` for more than one host."""
    both = launch(s, _site(s, "compose"))
    shared = math.ceil(s.whole("shared_memory_bytes") * 1.25) + (64 << 20)
    worker: Object = {
        **_service(s, "worker", both.worker),
        # One /dev/shm for both: the shared-memory plane's segments live there.
        "ipc": "shareable",
        "shm_size": shared,
        "restart": "unless-stopped",
    }
    orchestrator: Object = {
        **_service(s, "orchestrator", both.orchestrator),
        "ipc": "service:worker",
        "restart": "on-failure:10",
        "depends_on": {"worker": {"condition": "service_started"}},
    }
    worker["ports"] = [f"127.0.0.1:{WORKER_METRICS_PORT}:{WORKER_METRICS_PORT}"]
    published = [f"127.0.0.1:{ORCHESTRATOR_METRICS_PORT}:{ORCHESTRATOR_METRICS_PORT}"]
    if not s.text("rollouts"):
        published.append(f"{INGEST_PORT}:{INGEST_PORT}")
    orchestrator["ports"] = list(published)
    volumes: Object = {
        "run": {
            "driver": "local",
            "driver_opts": {
                "type": "tmpfs",
                "device": "tmpfs",
                "o": f"size=16m,uid={USER},gid={USER},mode=0700",
            },
        },
        "state": {},
    }
    return {
        "name": s.text("name"),
        "services": {"worker": worker, "orchestrator": orchestrator},
        "volumes": volumes,
    }


def _quoted(word: str) -> str:
    """systemd expands `%` and `$` and splits at spaces."""
    return (
        '"'
        + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
        + '"'
    )


def _unit(s: Settings, role: str, program: Program) -> str:
    name = s.text("name")
    other = f"prestage-{name}-worker.service"
    lines = ["[Unit]", f"Description=Prestage {role} of {name}"]
    if role == "orchestrator":
        lines += [f"Requires={other}", f"After={other}"]
    lines += ["", "[Service]", "Type=exec", "User=prestage", "Group=prestage"]
    command = " \\\n    ".join(_quoted(word) for word in program.argv[1:])
    lines.append(f"ExecStart={BIN_DIR}/{program.argv[0]} \\\n    {command}")
    lines += [f"Environment={_quoted(f'{n}={v}')}" for n, v in program.environment.items()]
    lines += [
        "RuntimeDirectory=prestage",
        "RuntimeDirectoryMode=0700",
        # Two units share the folder: it goes when the host does.
        "RuntimeDirectoryPreserve=yes",
        "StateDirectory=prestage",
        "StateDirectoryMode=0700",
        "KillSignal=SIGTERM",
        "KillMode=mixed",
        f"TimeoutStopSec={math.ceil(s.number('grace_s'))}",
        f"Restart={'always' if role == 'worker' else 'on-failure'}",
        "RestartSec=5",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "PrivateTmp=yes",
        "ProtectKernelTunables=yes",
        "ProtectControlGroups=yes",
        "RestrictSUIDSGID=yes",
        "CapabilityBoundingSet=",
        "UMask=0077",
    ]
    if role == "orchestrator":
        lines += ["", "[Install]", "WantedBy=multi-user.target"]
    return "\n".join(lines) + "\n"


def systemd(s: Settings) -> dict[str, str]:
    """File name to unit. Raises `RecipeError` for more than one host."""
    both = launch(s, _site(s, "systemd"))
    name = s.text("name")
    return {
        f"prestage-{name}-worker.service": _unit(s, "worker", both.worker),
        f"prestage-{name}-orchestrator.service": _unit(s, "orchestrator", both.orchestrator),
    }
