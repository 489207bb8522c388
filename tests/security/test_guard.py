"""Who gets through a guarded server: by certificate, by token, by role."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from prestage.admin.v1 import admin_pb2
from prestage.protocol import Reason
from prestage.rollout.v1 import rollout_pb2
from prestage.trainer.v1 import trainer_pb2
from prestage.wire.channel import AddressError, bind, make_server, open_channel
from prestage.wire.errors import Refusal, Unknown, classify
from prestage.wire.secret_files import SecurityError
from prestage.wire.security import (
    ALLOWED,
    Connections,
    Guard,
    Role,
    Security,
    SecurityConfig,
    check_reachable,
)
from prestage.wire.tls_files import TlsFiles
from tests.security.authority import Authority, put, token_folder

STATE = "/prestage.trainer.v1.TrainerWorker/GetState"
DRIVE = "/prestage.trainer.v1.TrainerWorker/FwdBwd"
SUBMIT = "/prestage.rollout.v1.RolloutIngest/SubmitTrajectories"


class _Everything(grpc.GenericRpcHandler):
    """Answers any method with its name."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        name = handler_call_details.method.encode()

        def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            for _ in requests:
                yield name

        return grpc.stream_stream_rpc_method_handler(answer)


@dataclass
class Served:
    """One guarded server."""

    address: str
    guard: Guard
    refused: Counter[tuple[str, str, Reason]] = field(default_factory=Counter)


@contextlib.contextmanager
def served(security: Security, address: str = "127.0.0.1:0") -> Iterator[Served]:
    refused: Counter[tuple[str, str, Reason]] = Counter()

    def on_refused(service: str, method: str, reason: Reason) -> None:
        refused[service, method, reason] += 1

    guard = security.guard(on_refused)
    server = make_server(2, name="t", guard=guard)
    server.add_generic_rpc_handlers((_Everything(),))
    port = bind(server, "--listen", address, guard=guard)
    server.start()
    try:
        yield Served(address=f"127.0.0.1:{port}" if port else address, guard=guard, refused=refused)
    finally:
        server.stop(0).wait()


def ask(channel: grpc.Channel, method: str, token: str | None = None) -> bytes:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    answer: bytes = channel.unary_unary(method)(b"", timeout=10, metadata=metadata)
    return answer


def outcome(channel: grpc.Channel, method: str, token: str | None = None) -> Refusal | Unknown:
    with pytest.raises(grpc.RpcError) as error:
        ask(channel, method, token)
    return classify(error.value)


def reason_of(channel: grpc.Channel, method: str, token: str | None = None) -> Reason:
    found = outcome(channel, method, token)
    assert isinstance(found, Refusal), found
    assert found.code.name == found.reason.value
    return found.reason


# -- tokens ---------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    return token_folder(tmp_path / "tokens")


def test_each_role_gets_what_the_table_says(tmp_path: Path, tokens: dict[str, str]) -> None:
    security = Security(SecurityConfig(token_dir=tmp_path / "tokens"))
    address = f"unix://{tmp_path}/s.sock"
    with served(security, address), open_channel(address) as channel:
        for method, roles in ALLOWED.items():
            for role in Role:
                token = tokens[role.value]
                if role in roles:
                    assert ask(channel, method, token) == method.encode()
                else:
                    assert reason_of(channel, method, token) is Reason.PERMISSION_DENIED


def test_without_a_token_or_with_a_wrong_one(
    tmp_path: Path, tokens: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    security = Security(SecurityConfig(token_dir=tmp_path / "tokens"))
    wrong = "w" * 64
    with served(security) as where, open_channel(where.address) as channel:
        with caplog.at_level(logging.DEBUG):
            for token in (None, "", wrong, tokens["drive"].upper(), f"{tokens['drive']} "):
                assert reason_of(channel, DRIVE, token) is Reason.UNAUTHENTICATED
            found = outcome(channel, DRIVE, wrong)
            assert reason_of(channel, "/a.B/C", tokens["drive"]) is Reason.PERMISSION_DENIED
        call = channel.unary_unary(DRIVE)
        both = [("authorization", f"Bearer {tokens[role]}") for role in ("read", "drive")]
        with pytest.raises(grpc.RpcError) as error:
            call(b"", timeout=10, metadata=both)
        told = classify(error.value)
        assert isinstance(told, Refusal) and told.reason is Reason.UNAUTHENTICATED
        assert ask(channel, DRIVE, tokens["drive"]) == DRIVE.encode()
    name = ("prestage.trainer.v1.TrainerWorker", "FwdBwd", Reason.UNAUTHENTICATED)
    assert where.refused[name] == 7
    assert where.refused["unknown", "unknown", Reason.PERMISSION_DENIED] == 1
    secrets = (wrong, *tokens.values())
    assert not [item for item in secrets if item in caplog.text + str(found)]
    assert caplog.text.count("FwdBwd from") == 3, "the 1st, 2nd and 4th of 6"


def test_every_method_of_every_service_is_in_the_table() -> None:
    modules = (
        admin_pb2,
        rollout_pb2,
        trainer_pb2,
        health_pb2,
        reflection_pb2,
        channelz_pb2,
    )
    found = {
        f"/{service.full_name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert found <= set(ALLOWED), "a method that nobody may call"
    stale = {name for name in ALLOWED if "/prestage.hosts." not in name} - found
    assert stale <= {"/grpc.health.v1.Health/List"}


def test_our_clients_send_the_token_of_their_role(tmp_path: Path, tokens: dict[str, str]) -> None:
    security = Security(SecurityConfig(token_dir=tmp_path / "tokens"))
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(served(security))
        with security.open_channel("--trainer", where.address, Role.DRIVE) as channel:
            assert ask(channel, DRIVE) == DRIVE.encode()
            assert reason_of(channel, SUBMIT) is Reason.PERMISSION_DENIED
            stream = channel.stream_stream(STATE)
            assert list(stream(iter([b"", b""]), timeout=10)) == [STATE.encode()] * 2
            assert channel.stream_unary(STATE)(iter([b""]), timeout=10) == STATE.encode()
            assert list(channel.unary_stream(STATE)(b"", timeout=10)) == [STATE.encode()]
            future = channel.unary_unary(STATE).future(b"", timeout=10)
            assert future.result(timeout=10) == STATE.encode()
    (tmp_path / "tokens" / "submit").unlink()
    again = Security(SecurityConfig(token_dir=tmp_path / "tokens"))
    with pytest.raises(SecurityError, match="submit is missing"):
        again.open_channel("address", where.address, Role.SUBMIT)


# -- certificates -----------------------------------------------------------------------------------


def _security(authority: Authority, folder: Path, **settings: str) -> Security:
    tls = authority.folder(folder)
    return Security(SecurityConfig(tls_dir=tls, server_name=settings.get("server_name", "")))


def test_only_a_certificate_of_the_same_authority_gets_through(tmp_path: Path) -> None:
    authority = Authority()
    security = _security(authority, tmp_path / "server")
    client = _security(authority, tmp_path / "client")
    stranger = _security(Authority(), tmp_path / "stranger")
    put(tmp_path / "stranger" / "ca.crt", authority.pem, 0o644)  # It believes the server.
    stranger = Security(SecurityConfig(tls_dir=tmp_path / "stranger"))
    with served(security) as where:
        for _ in range(2):
            with client.open_channel("--trainer", where.address, Role.DRIVE) as channel:
                assert ask(channel, DRIVE) == DRIVE.encode()
        with stranger.open_channel("--trainer", where.address, Role.DRIVE) as channel:
            assert isinstance(outcome(channel, DRIVE), Unknown)
        with open_channel(where.address) as channel:  # Plain text.
            assert isinstance(outcome(channel, DRIVE), Unknown)
        bare = grpc.ssl_channel_credentials(root_certificates=authority.pem)
        with open_channel(where.address, bare) as channel:  # No certificate.
            assert isinstance(outcome(channel, DRIVE), Unknown)
        with client.open_channel("--trainer", where.address, Role.DRIVE) as channel:
            assert ask(channel, DRIVE) == DRIVE.encode()


def test_a_server_of_another_name_or_authority_is_not_believed(tmp_path: Path) -> None:
    authority = Authority()
    elsewhere = Security(
        SecurityConfig(tls_dir=authority.folder(tmp_path / "a", hosts=("worker-0",)))
    )
    client = _security(authority, tmp_path / "client")
    with served(elsewhere) as where:
        with client.open_channel("--trainer", where.address, Role.DRIVE) as channel:
            assert isinstance(outcome(channel, DRIVE), Unknown)
        named = Security(SecurityConfig(tls_dir=tmp_path / "client", server_name="worker-0"))
        with named.open_channel("--trainer", where.address, Role.DRIVE) as channel:
            assert ask(channel, DRIVE) == DRIVE.encode()
    with (
        served(_security(Authority(), tmp_path / "b")) as where,
        client.open_channel("--trainer", where.address, Role.DRIVE) as channel,
    ):
        assert isinstance(outcome(channel, DRIVE), Unknown)


def test_a_unix_socket_needs_no_certificate(tmp_path: Path) -> None:
    security = _security(Authority(), tmp_path / "tls")
    address = f"unix://{tmp_path}/s.sock"
    with served(security, address), open_channel(address) as channel:
        assert ask(channel, DRIVE) == DRIVE.encode()
        with security.open_channel("--trainer", address, Role.DRIVE) as ours:
            assert ask(ours, DRIVE) == DRIVE.encode()


def test_a_renewed_authority_is_followed_on_both_sides(tmp_path: Path) -> None:
    """Everything is replaced under a server and a channel that live on."""
    at = [0.0]
    old = Authority("old")
    security = _security(old, tmp_path / "tls")
    security.tls = TlsFiles(tmp_path / "tls", clock=lambda: at[0])
    with served(security) as where:
        channel = security.open_channel("--trainer", where.address, Role.DRIVE)
        call = channel.unary_unary(DRIVE)
        assert call(b"", timeout=10) == DRIVE.encode()
        new = Authority("new")
        new.folder(tmp_path / "tls")
        at[0] += 60.0
        assert call(b"", timeout=10) == DRIVE.encode()
        assert security.tls.current()[0] == 2
        # A client of the old authority is not let in any more, one of the new is.
        with _security(old, tmp_path / "old").open_channel(
            "--trainer", where.address, Role.DRIVE
        ) as late:
            assert isinstance(outcome(late, DRIVE), Unknown)
        with _security(new, tmp_path / "new").open_channel(
            "--trainer", where.address, Role.DRIVE
        ) as late:
            assert ask(late, DRIVE) == DRIVE.encode()
        channel.close()


# -- addresses --------------------------------------------------------------------------------------


def test_an_address_of_the_network_needs_protection(tmp_path: Path) -> None:
    for address in ("unix:///run/a.sock", "127.0.0.1:1", "localhost:1", "[::1]:1"):
        check_reachable("--listen", address, protected=False, insecure=False)
    for address in ("0.0.0.0:1", "10.0.0.1:1", "[::]:1", "worker-0:1"):
        with pytest.raises(AddressError, match=r"--listen .* --tls_dir .* --insecure"):
            check_reachable("--listen", address, protected=False, insecure=False)
        check_reachable("--listen", address, protected=True, insecure=False)
        check_reachable("--listen", address, protected=False, insecure=True)
    with pytest.raises(AddressError, match="--trainer"):
        Security().open_channel("--trainer", "worker-0:1", Role.DRIVE)


def test_connections_that_carry_no_call_are_counted_once_they_are_late() -> None:
    at = [0.0]
    connections = Connections(clock=lambda: at[0])
    for number in range(10):
        connections.began()
        if number % 2:
            connections.used(f"ipv4:10.0.0.1:{number}")
            connections.used(f"ipv4:10.0.0.1:{number}")
    assert connections.refused == 0
    at[0] = 20.0
    assert connections.refused == 5
    connections.used("unix:")
    connections.used("ipv4:10.0.0.1:2")  # Late: what was counted stays.
    assert connections.refused == 5
