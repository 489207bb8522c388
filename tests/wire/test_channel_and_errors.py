"""Channel settings that hold on both ends, sockets nobody else may use, and refusals with details."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import grpc
import pytest

import prestage
from prestage.protocol import Reason
from prestage.wire import channel, errors
from prestage.wire.channel import (
    CLIENT_OPTIONS,
    SERVER_OPTIONS,
    AddressError,
    bind,
    make_server,
    open_channel,
)
from prestage.wire.errors import (
    CODE_OF_REASON,
    MAX_MESSAGE_BYTES,
    REASON_OF_ERROR,
    Refusal,
    Unknown,
    WireError,
    abort_with,
    classify,
)

CLIENT, SERVER = dict(CLIENT_OPTIONS), dict(SERVER_OPTIONS)
WIRE = Path(channel.__file__).parent


def test_r28_the_client_pings_no_faster_than_the_server_allows() -> None:
    assert (
        CLIENT["grpc.keepalive_time_ms"] >= SERVER["grpc.http2.min_ping_interval_without_data_ms"]
    )
    for options in (CLIENT, SERVER):
        assert options["grpc.http2.max_pings_without_data"] == 0
        assert options["grpc.http2.ping_timeout_ms"] < options["grpc.keepalive_time_ms"]
        # Silently ignored by the library; the name above is the one that works.
        assert "grpc.http2.min_recv_ping_interval_without_data_ms" not in options


def test_message_limits_are_capped_on_both_ends() -> None:
    for options in (CLIENT, SERVER):
        for key in ("grpc.max_send_message_length", "grpc.max_receive_message_length"):
            assert 0 < options[key] <= 64 << 20


def test_no_call_is_retried_by_the_library() -> None:
    assert CLIENT["grpc.enable_retries"] == 0


def test_only_the_channel_module_sets_options() -> None:
    root = Path(prestage.__file__).parents[2]
    for folder in ("protos/prestage", "orchestrator", "trainer_worker"):
        for path in (root / folder).rglob("*.py"):
            if path.name == "channel.py" or "bench" in path.parts or "_pb2" in path.name:
                continue
            text = path.read_text()
            assert "grpc.insecure_channel(" not in text, path
            assert "grpc.server(" not in text, path


@pytest.fixture
def server() -> grpc.Server:
    return make_server(1, name="t")


def test_a_unix_socket_is_for_its_owner_alone(server: grpc.Server, tmp_path: Path) -> None:
    before = os.umask(0o022)
    os.umask(before)
    bind(server, "--listen", f"unix://{tmp_path}/a.sock")
    mode = (tmp_path / "a.sock").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    after = os.umask(before)
    assert after == before


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_r46_two_servers_on_one_address_are_impossible(
    server: grpc.Server, tmp_path: Path, kind: str
) -> None:
    address = f"unix://{tmp_path}/a.sock" if kind == "unix" else "127.0.0.1:0"
    port = bind(server, "--listen", address)
    server.start()
    if kind == "tcp":
        address = f"127.0.0.1:{port}"
    other = make_server(1, name="o")
    try:
        with pytest.raises(AddressError, match="another process"):
            bind(other, "--listen", address)
        assert kind == "tcp" or (tmp_path / "a.sock").exists(), "the first server's socket stays"
    finally:
        server.stop(0).wait()
        other.stop(0).wait()


def test_a_dead_servers_socket_is_taken_over(server: grpc.Server, tmp_path: Path) -> None:
    script = (
        "import socket,sys,os; s=socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.sock")], check=True)
    bind(server, "--listen", f"unix://{tmp_path}/a.sock")


def test_a_file_that_is_no_socket_is_left_alone(server: grpc.Server, tmp_path: Path) -> None:
    (tmp_path / "a.sock").write_text("notes")
    with pytest.raises(AddressError, match="is no socket"):
        bind(server, "--listen", f"unix://{tmp_path}/a.sock")
    assert (tmp_path / "a.sock").read_text() == "notes"


@pytest.mark.parametrize(
    "address", ["", "unix://relative", "host", "host:port", "host:70000", "unix:///" + "x" * 120]
)
def test_bad_addresses_are_named(address: str) -> None:
    with pytest.raises(AddressError, match="--listen"):
        channel.check_address("--listen", address)


def test_r45_forking_is_refused_and_starting_programs_is_not() -> None:
    script = textwrap.dedent(
        """
        import multiprocessing, os, subprocess, sys
        from prestage.wire.channel import forbid_fork
        forbid_fork(); forbid_fork()
        subprocess.run([sys.executable, "-c", ""], check=True)
        try:
            os.fork()
        except RuntimeError as error:
            assert "spawn" in str(error), error
        else:
            os._exit(3)
        try:
            multiprocessing.get_context("fork").Process(target=print).start()
        except RuntimeError:
            sys.exit(7)
        """
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7


def test_r44_nothing_here_unpickles() -> None:
    for path in WIRE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in (
                    "pickle",
                    "cloudpickle",
                    "dill",
                    "marshal",
                    "shelve",
                    "multiprocessing",
                ), path


# -- refusals -----------------------------------------------------------------------------------


def _all_errors(root: type[WireError] = WireError) -> set[type[WireError]]:
    return {root}.union(*(_all_errors(child) for child in root.__subclasses__()))


def test_every_error_has_a_reason_and_every_reason_a_status() -> None:
    assert set(REASON_OF_ERROR) == _all_errors()
    assert set(CODE_OF_REASON) == set(Reason)


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = errors.__doc__ or ""
    for kind in _all_errors():
        line = next(line for line in drawn.splitlines() if kind.__name__ in line.split())
        if kind is not WireError:
            assert REASON_OF_ERROR[kind].value in line, kind


def test_no_refusal_uses_a_status_that_the_library_makes_itself() -> None:
    """Else a lost call could look like a refusal, and be taken for not carried out."""
    own = {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
    assert not own & set(CODE_OF_REASON.values())


def _answer(tmp_path: Path, handler: object, request: bytes = b"") -> grpc.RpcError:
    server = make_server(2, name="t")
    method = grpc.unary_unary_rpc_method_handler(handler)  # type: ignore[arg-type, var-annotated]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"M": method}),))
    address = f"unix://{tmp_path}/e.sock"
    bind(server, "--listen", address)
    server.start()
    try:
        with open_channel(address) as opened, pytest.raises(grpc.RpcError) as error:
            opened.unary_unary("/t.T/M")(request, timeout=10)
        return error.value
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("reason", list(Reason))
def test_a_refusal_travels_whole(tmp_path: Path, reason: Reason) -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        abort_with(context, reason, "the step is open", {"phase": "CLOSED", "staged": ""})

    assert classify(_answer(tmp_path, refuse)) == Refusal(
        code=CODE_OF_REASON[reason],
        reason=reason,
        message="the step is open",
        metadata={"phase": "CLOSED", "staged": ""},
    )


@pytest.mark.parametrize("reason", [Reason.INVALID_BATCH, Reason.STEP_OPEN])
def test_a_long_message_does_not_lose_the_refusal(tmp_path: Path, reason: Reason) -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        abort_with(context, reason, "€" * 100_000, {"allowed": "x" * 500})

    outcome = classify(_answer(tmp_path, refuse))
    assert isinstance(outcome, Refusal)
    assert outcome.reason is reason
    assert MAX_MESSAGE_BYTES - 6 <= len(outcome.message.encode()) <= MAX_MESSAGE_BYTES
    assert outcome.message.endswith("€…")


@pytest.mark.parametrize("how", ["raises", "plain abort", "unknown method", "too large"])
def test_an_answer_without_details_is_an_unknown_outcome(tmp_path: Path, how: str) -> None:
    def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
        if how == "raises":
            raise ValueError("a bug")
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no details")
        return b""

    request = bytes(65 << 20) if how == "too large" else b""
    outcome = classify(_answer(tmp_path, None if how == "unknown method" else handler, request))
    assert isinstance(outcome, Unknown)


def test_details_of_another_service_are_not_ours(tmp_path: Path) -> None:
    from google.protobuf import any_pb2
    from google.rpc import error_details_pb2, status_pb2
    from grpc_status import rpc_status

    def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.ErrorInfo(reason="UPDATE_DEFERRED", domain="other"))
        status = status_pb2.Status(code=9, message="m", details=[packed])
        context.abort_with_status(rpc_status.to_status(status))
        return b""

    assert isinstance(classify(_answer(tmp_path, handler)), Unknown)
