"""Channel and server settings, in one place for both sides. Addresses: unix:///path or host:port.

Keepalive pings are answered without Python: they show that the process runs, not that it makes
progress. The client's interval must not be below the server's minimum, or the server ends the
connection in the middle of a long call.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import resource
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

import grpc

MAX_MESSAGE_BYTES: Final = 64 << 20
KEEPALIVE_MS: Final = 60_000
PING_TIMEOUT_MS: Final = 20_000
SERVER_MIN_PING_MS: Final = 30_000

MAX_STREAMS_PER_CONNECTION: Final = 128
MAX_CONNECTIONS: Final = 1024
"""Of one server; more are closed at once, so that files stay for everything else."""
HANDSHAKE_MS: Final = 10_000
"""A connection that has not finished its handshake by then is closed."""
MAX_METADATA_BYTES: Final = 16 << 10

CONTROL_ONLY: Final = MappingProxyType({"grpc.max_receive_message_length": 1 << 20})
"""Changes for a server that takes no payloads."""

Option = tuple[str, int]

_COMMON: Final[tuple[Option, ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
CLIENT_OPTIONS: Final[tuple[Option, ...]] = (
    *_COMMON,
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # From gRPC's least: its default of 1 s would be most of a restart on the same machine.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
SERVER_OPTIONS: Final[tuple[Option, ...]] = (
    *_COMMON,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", SERVER_MIN_PING_MS),
    ("grpc.keepalive_permit_without_calls", 1),
)


class AddressError(ValueError):
    """An address that cannot be used; names it and the fix."""


def unix_path(address: str) -> Path | None:
    """The socket path of a unix address, else None."""
    if address.startswith("unix://"):
        return Path(address.removeprefix("unix://"))
    if address.startswith("unix:"):
        return Path(address.removeprefix("unix:"))
    return None


def is_local(address: str) -> bool:
    """Whether only this host can reach it: a unix socket or a loopback address."""
    if unix_path(address) is not None:
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(flag: str, address: str) -> None:
    """Raises `AddressError` for anything but unix:///path and host:port."""
    path = unix_path(address)
    if path is not None:
        if not path.is_absolute():
            raise AddressError(f"{flag} is {address!r}: write unix:///absolute/path")
        if len(str(path)) > 100:
            raise AddressError(f"{flag} is {address!r}: a socket path has at most 100 characters")
        if not path.parent.is_dir():
            raise AddressError(f"{flag} is {address!r}: the folder {path.parent} does not exist")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise AddressError(f"{flag} is {address!r}: write unix:///path or host:port")


def status_address(address: str) -> str:
    """The default address of the status port: the socket path + `.health`, or port + 1."""
    path = unix_path(address)
    if path is not None:
        return f"unix://{path}.health"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


class ServerGuard(Protocol):
    """What protects a server: `security.Guard`."""

    def interceptors(self) -> Sequence[grpc.ServerInterceptor]: ...

    def credentials(self, address: str) -> grpc.ServerCredentials | None: ...


def _changed(options: tuple[Option, ...], changes: Mapping[str, int]) -> list[Option]:
    kept = [option for option in options if option[0] not in changes]
    return [*kept, *changes.items()]


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    server_name: str = "",
    changes: Mapping[str, int] | None = None,
) -> grpc.Channel:
    """A channel without retries. Plain text unless credentials are given.

    `server_name`: what the server's certificate must name, where that is not the address's host.
    `changes`: options that this one has otherwise.
    """
    options = _changed(CLIENT_OPTIONS, changes or {})
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    named = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return grpc.secure_channel(address, credentials, options=[*options, *named])


def make_server(
    threads: int,
    *,
    name: str,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
    guard: ServerGuard | None = None,
    max_calls: int | None = None,
    changes: Mapping[str, int] | None = None,
) -> grpc.Server:
    """A server with a pool of its own. The guard decides before the other interceptors.

    `max_calls`: running and queued ones; more are refused (default: four per thread). `changes`:
    options that this one has otherwise.
    """
    pool = futures.ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
    return grpc.server(
        pool,
        options=_changed(SERVER_OPTIONS, changes or {}),
        interceptors=[*(guard.interceptors() if guard is not None else ()), *interceptors],
        maximum_concurrent_rpcs=threads * 4 if max_calls is None else max_calls,
    )


def bind(
    server: grpc.Server,
    flag: str,
    address: str,
    credentials: grpc.ServerCredentials | None = None,
    *,
    guard: ServerGuard | None = None,
) -> int:
    """Bind one address, alone. Returns the port (0 for a unix socket). Raises `AddressError`.

    A unix socket gets mode 0600. A socket file that nobody answers on is removed first. `guard`:
    gives the credentials for this address.
    """
    check_address(flag, address)
    if guard is not None:
        credentials = guard.credentials(address)
    path = unix_path(address)
    if path is not None:
        _clear_stale(flag, path)
    before = os.umask(0o177)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise AddressError(
            f"{flag}: cannot listen on {address!r}: another process has it, or it is not an address"
            f" of this host ({error})"
        ) from error
    finally:
        os.umask(before)
    if path is not None and path.exists() and stat.S_IMODE(path.stat().st_mode) != 0o600:
        path.chmod(0o600)
    return 0 if path is not None else port


def _clear_stale(flag: str, path: Path) -> None:
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise AddressError(f"{flag}: {path} exists and is no socket; choose another path")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(2.0)
    try:
        probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # Its process is dead.
        return
    except OSError as error:
        raise AddressError(f"{flag}: {path} cannot be probed: {error}") from error
    finally:
        probe.close()
    raise AddressError(
        f"{flag}: another process already listens on {path}: stop it, or choose another path"
    )


def forbid_fork() -> None:
    """Make every later fork of this process raise: gRPC's threads do not survive one.

    Starting programs (`subprocess`) and `multiprocessing` with spawn go on working.
    """
    global _fork_forbidden
    if _fork_forbidden:
        return
    _fork_forbidden = True

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        del arguments
        if event in ("os.fork", "os.forkpty"):
            raise RuntimeError(
                "this process must not fork once gRPC runs: use subprocess, or multiprocessing's"
                " spawn context"
            )

    sys.addaudithook(refuse)


_fork_forbidden = False


def raise_file_limit() -> int:
    """Let this process open as many files as it may: each connection is one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # Some systems say "infinite" and mean less.
            return soft
    return hard


def tune_allocator() -> bool:
    """Make glibc keep large buffers instead of giving them back after each message.

    Measured: one stream moves about twice as fast. False where there is no glibc.
    """
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = (
        (m_mmap_threshold, 64 << 20),
        (m_trim_threshold, 256 << 20),
        (m_top_pad, 16 << 20),
    )
    return all(mallopt(key, value) == 1 for key, value in settings)
