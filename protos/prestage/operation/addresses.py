"""Addresses of plain HTTP pages (probes, metrics, status): host:port, bound before anything else runs."""

from __future__ import annotations

import contextlib
import socket

from prestage.wire.channel import AddressError, unix_path


def split_host_port(flag: str, address: str) -> tuple[str, int]:
    """`host:port` or `[host]:port`. Raises `AddressError` naming the flag and the value."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise AddressError(f"{flag} is {address!r}: write host:port, as in 127.0.0.1:9464")
    return host, int(port)


def listen_tcp(flag: str, host: str, port: int, *, backlog: int = 64) -> socket.socket:
    """A listening socket. Raises `AddressError`: one line that names the flag and what to do."""
    said = f"{flag}: cannot listen on {host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(f"{said}: {host!r} is no address of a host ({error})") from error
    family, kind, protocol, _, where = found[0]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, kind, protocol))
        # A restart binds at once; two living listeners still exclude each other.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen(backlog)
        except OSError as error:
            raise AddressError(
                f"{said}: {error.strerror or error}: choose another port, or stop what has it"
            ) from error
        stack.pop_all()
    return listener


def check_free(flag: str, address: str) -> None:
    """Raises `AddressError` when a TCP address cannot be listened on; leaves unix sockets to gRPC.

    gRPC would say so, too, but in lines of its own before the error.
    """
    if unix_path(address) is None:
        listen_tcp(flag, *split_host_port(flag, address)).close()


def port_of(listener: socket.socket) -> int:
    """The port that a listening socket got."""
    return int(listener.getsockname()[1])
