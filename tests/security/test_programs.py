"""Both programs: what cannot be used is one line at start, and a live run works over mTLS with tokens."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from prestage.protocol import Reason
from prestage.trainer.v1 import trainer_pb2 as pb
from prestage.trainer.v1 import trainer_pb2_grpc as pb_grpc
from prestage.wire.errors import Refusal, Unknown, classify
from prestage.wire.security import Role, Security, SecurityConfig
from tests.security.authority import DAY, Authority, put, token_folder
from tests.security.worker_process import free_port, worker_process

ROLLOUTS = Path(__file__).parents[1] / "data" / "rollouts.parquet"


def _key_of_another(folder: Path) -> None:
    other = Authority().folder(folder / "other")
    put(folder / "tls" / "tls.key", (other / "tls.key").read_bytes(), 0o600)


def _expired(folder: Path) -> None:
    Authority().folder(
        folder / "tls", valid_from=-3 * DAY, valid_until=datetime.timedelta(hours=-1)
    )


def _short_token(folder: Path) -> None:
    put(folder / "tokens" / "drive", b"hunter2", 0o600)


def _open_token(folder: Path) -> None:
    (folder / "tokens" / "read").chmod(0o644)


def _program(program: str, folder: Path, *flags: str) -> list[str]:
    own = {
        "trainer_worker": ["--engine=timed", f"--listen=unix://{folder}/w.sock"],
        "orchestrator": [
            f"--trainer=unix://{folder}/nobody.sock",
            f"--rollouts={ROLLOUTS}",
            "--trainer_wait_s=0.1",
        ],
    }
    return [sys.executable, "-m", f"{program}.main", *own[program], *flags]


def _refused(command: list[str], says: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert says in last, done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize(
    ("program", "damage", "says"),
    [  # The files themselves are `test_files`'s; here, that both programs end well on each kind.
        ("trainer_worker", _key_of_another, "--tls_dir: tls.key is not the key of tls.crt"),
        ("trainer_worker", _open_token, "read has mode 0644"),
        ("orchestrator", _expired, "which expired at"),
        ("orchestrator", _short_token, "drive has 7 characters"),
    ],
)
def test_files_that_cannot_be_used_are_one_line(
    tmp_path: Path, program: str, damage: Callable[[Path], None], says: str
) -> None:
    Authority().folder(tmp_path / "tls")
    token_folder(tmp_path / "tokens")
    damage(tmp_path)
    flags = (f"--tls_dir={tmp_path}/tls", f"--token_dir={tmp_path}/tokens")
    _refused(_program(program, tmp_path, *flags), says)


def test_no_address_of_the_network_without_certificates(tmp_path: Path) -> None:
    worker = _program("trainer_worker", tmp_path, f"--listen=0.0.0.0:{free_port()}")
    _refused(worker, "--listen is '0.0.0.0:")
    beside = f"--health_listen=0.0.0.0:{free_port()}"
    _refused(_program("trainer_worker", tmp_path, beside), "--health_listen is '0.0.0.0:")
    admin = _program("orchestrator", tmp_path, f"--health_listen=0.0.0.0:{free_port()}")
    _refused(admin, "--health_listen is '0.0.0.0:")
    dials = _program("orchestrator", tmp_path, "--trainer=worker.example:7443")
    _refused(dials, "--trainer is 'worker.example:7443', on another host: give --tls_dir")
    live = [part for part in admin[:-1] if not part.startswith("--rollouts")]
    live += [f"--listen=0.0.0.0:{free_port()}", f"--journal_dir={tmp_path}/journal"]
    _refused(live, "--listen is '0.0.0.0:")


@pytest.mark.slow
def test_a_live_run_over_mtls_with_tokens(tmp_path: Path) -> None:
    """Producers with `submit` alone, an operator with `read` alone; the other roles' calls refused."""
    with worker_process(tmp_path) as worker:
        rollouts, admin, metrics = free_port(), free_port(), free_port()
        tls = f"--tls_dir={tmp_path}/tls"
        for role in ("submit", "read"):
            folder = tmp_path / f"only-{role}"
            folder.mkdir()
            put(folder / role, worker.tokens[role].encode(), 0o600)
        command = [
            sys.executable,
            "-m",
            "orchestrator.main",
            f"--trainer={worker.address}",
            f"--listen=127.0.0.1:{rollouts}",
            f"--journal_dir={tmp_path}/journal",
            f"--health_listen=127.0.0.1:{admin}",
            f"--metrics_port={metrics}",
            "--run_id=live",
            "--num_steps=3",
            "--noprogress",
            tls,
            f"--token_dir={tmp_path}/tokens",
            f"--result_file={tmp_path}/result.json",
        ]
        with (tmp_path / "orchestrator.log").open("wb") as log:
            orchestrator = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:

            def cli(*words: str) -> subprocess.CompletedProcess[str]:
                return subprocess.run(
                    [sys.executable, "-m", "orchestrator.main", *words, tls],
                    capture_output=True,
                    text=True,
                    timeout=120,
                )

            submit = ("submit", f"--to=127.0.0.1:{rollouts}", "--run_id=live")
            submit = (*submit, f"--rollouts={ROLLOUTS}")
            (tmp_path / "wrong").mkdir()
            put(tmp_path / "wrong" / "submit", worker.tokens["read"].encode(), 0o600)
            wrong = cli(*submit, f"--token_dir={tmp_path}/wrong")
            assert wrong.returncode != 0 and "PERMISSION_DENIED" in wrong.stderr, wrong.stderr
            status = ("status", f"--admin=127.0.0.1:{admin}", "--json")
            look = cli(*status, f"--token_dir={tmp_path}/only-read")
            assert look.returncode == 0, look.stderr
            stop = cli("stop", f"--admin=127.0.0.1:{admin}", f"--token_dir={tmp_path}/only-read")
            assert stop.returncode == 2 and "drive" in stop.stderr, stop.stderr
            nobody = cli(*status)
            assert nobody.returncode == 1 and "UNAUTHENTICATED" in nobody.stderr, nobody.stderr
            page = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=10)
            text = page.read().decode()
            for service, reason, count in (
                ("RolloutIngest", "PERMISSION_DENIED", 1),
                ("OrchestratorAdmin", "UNAUTHENTICATED", 1),
            ):
                label = f'prestage_refusals_total{{reason="{reason}",service="{service}"}} '
                assert f"{label}{count}.0" in text, text
            sent = cli(*submit, f"--token_dir={tmp_path}/only-submit")
            assert sent.returncode == 0, sent.stderr
            assert orchestrator.wait(timeout=120) == 0
        finally:
            orchestrator.kill()
            orchestrator.wait()
    output = (tmp_path / "orchestrator.log").read_text()
    assert len(json.loads((tmp_path / "result.json").read_text())["steps"]) == 3, output
    shown = output + worker.log + wrong.stderr + nobody.stderr + sent.stdout
    assert not [token for token in worker.tokens.values() if token in shown]


@pytest.mark.slow
def test_certificates_and_tokens_are_renewed_under_a_running_worker(tmp_path: Path) -> None:
    """A new authority, a new pair and new tokens: the same channel goes on, the old ones are nobody's."""
    with worker_process(tmp_path) as worker:
        channel = worker.security().open_channel("--trainer", worker.address, Role.DRIVE)
        stub = pb_grpc.TrainerWorkerStub(channel)
        assert stub.GetState(pb.GetStateRequest(), timeout=10).state.incarnation
        expiry = "prestage_worker_certificate_expiry_timestamp_seconds"
        before_s = worker.metrics()[expiry, ()]
        Authority().folder(tmp_path / "old")  # What somebody kept.
        for name in ("tls.crt", "tls.key", "ca.crt"):
            put(tmp_path / "old" / name, (tmp_path / "tls" / name).read_bytes(), 0o600)
        Authority("new").folder(tmp_path / "tls", valid_until=20 * DAY)
        put(tmp_path / "old" / "ca.crt", (tmp_path / "tls" / "ca.crt").read_bytes(), 0o600)
        token_folder(tmp_path / "tokens")

        def renewed() -> bool:
            try:
                stub.GetState(pb.GetStateRequest(), timeout=5)
            except grpc.RpcError:
                return False  # The two look every few seconds, not at the same moment.
            return worker.metrics()[expiry, ()] > before_s + 5 * 86400

        give_up = time.monotonic() + 60
        while not renewed():
            assert time.monotonic() < give_up, worker.log[-2000:]
            time.sleep(0.2)
        old = Security(SecurityConfig(tls_dir=tmp_path / "old"))
        new = Security(SecurityConfig(tls_dir=tmp_path / "tls"))

        def with_old_token(security: Security) -> Refusal | Unknown:
            metadata = [("authorization", f"Bearer {worker.tokens['drive']}")]
            with security.open_channel("--trainer", worker.address, Role.DRIVE) as late:
                call = pb_grpc.TrainerWorkerStub(late).GetState
                with pytest.raises(grpc.RpcError) as error:
                    call(pb.GetStateRequest(), timeout=10, metadata=metadata)
                return classify(error.value)

        assert isinstance(with_old_token(old), Unknown), "it does not get to say its token"
        refused = with_old_token(new)
        assert isinstance(refused, Refusal) and refused.reason is Reason.UNAUTHENTICATED
        channel.close()
