"""Enough of HTTP/2 to say what no client library says: a gRPC message that claims any length."""

from __future__ import annotations

import socket
import ssl
import struct
from pathlib import Path

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """A literal field without indexing. Both shorter than 127 bytes."""
    assert len(name) < 127 and len(value) < 127
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Connection:
    """One connection over mTLS, one call on it."""

    def __init__(self, address: str, tls_dir: Path) -> None:
        context = ssl.create_default_context(cafile=str(tls_dir / "ca.crt"))
        context.load_cert_chain(tls_dir / "tls.crt", tls_dir / "tls.key")
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        bare = socket.create_connection((host, int(port)), timeout=20)
        self._socket = context.wrap_socket(bare, server_hostname=host)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        self._buffer = b""

    def call(self, method: str, token: str) -> None:
        fields = (
            (":method", "POST"),
            (":scheme", "https"),
            (":path", method),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("authorization", f"Bearer {token}"),
        )
        block = b"".join(_header(*field) for field in fields)
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, 1, block))

    def message(self, claimed_bytes: int, content: bytes) -> None:
        """The start of a message that says it has so many bytes."""
        prefix = b"\0" + struct.pack(">I", claimed_bytes)
        self._socket.sendall(_frame(_DATA, 0, 1, prefix + content))

    def ended(self) -> str:
        """How the server ends the call: reads until it does."""
        while True:
            while len(self._buffer) < 9:
                self._more()
            size = int.from_bytes(self._buffer[:3])
            kind, flags = self._buffer[3], self._buffer[4]
            while len(self._buffer) < 9 + size:
                self._more()
            self._buffer = self._buffer[9 + size :]
            if kind == _SETTINGS and not flags & _ACK:
                self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            if kind == _HEADERS and flags & _END_STREAM:
                return "trailers"
            if kind in (_RST, _GOAWAY):
                return "reset"

    def _more(self) -> None:
        got = self._socket.recv(65536)
        if not got:
            raise ConnectionError("the server closed the connection")
        self._buffer += got

    def close(self) -> None:
        self._socket.close()
