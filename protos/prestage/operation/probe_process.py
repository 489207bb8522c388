"""The process that answers liveness probes, so that a busy interpreter cannot fail them.

Runs as a script of its own (`python -E -s -S probe_process.py LISTEN_FD HEARTBEAT_FD`): standard
library only, and little of it, so that it starts in milliseconds and stays small. It reads a heartbeat
that the program writes into shared memory, and ends when its standard input does, which is when the
program is gone. It never decides anything about the program but "alive" and "ready".
"""

from __future__ import annotations

import math
import mmap
import selectors
import signal
import socket
import struct
import sys
import time
import zlib
from typing import Final, NamedTuple

SLOTS: Final = 2
"""Written in turn: whatever moment the writer is stopped at, one slot is whole."""
_FIELDS: Final = struct.Struct("<Qdddd??48s240s")
_SUM: Final = struct.Struct("<I")
SLOT_BYTES: Final = _FIELDS.size + _SUM.size
HEARTBEAT_BYTES: Final = SLOTS * SLOT_BYTES
_MAX_CLIENTS: Final = 64
_CLIENT_SECONDS: Final = 5.0
_REQUEST_BYTES: Final = 4096


class Beat(NamedTuple):
    """One heartbeat. Monotonic seconds (one clock for all processes of a host)."""

    counter: int
    beat_s: float  # When the program's Python last ran.
    progress_s: float  # When the program last made progress.
    allowance_s: float  # How long the present state may take without progress; inf = for ever.
    silence_s: float  # How long Python may be silent in the present state.
    started: bool
    ready: bool
    state: str
    reason: str  # Why it is not ready or not alive; empty = no reason.


def pack(beat: Beat) -> bytes:
    """One slot's bytes."""
    fields = _FIELDS.pack(
        beat.counter,
        beat.beat_s,
        beat.progress_s,
        beat.allowance_s,
        beat.silence_s,
        beat.started,
        beat.ready,
        beat.state.encode()[:48],
        beat.reason.encode()[:240],
    )
    return fields + _SUM.pack(zlib.crc32(fields))


def unpack(data: bytes) -> Beat | None:
    """The newest whole slot; None when there is none."""
    newest: Beat | None = None
    for start in range(0, HEARTBEAT_BYTES, SLOT_BYTES):
        fields = data[start : start + _FIELDS.size]
        total = data[start + _FIELDS.size : start + SLOT_BYTES]
        if len(total) != _SUM.size or _SUM.unpack(total)[0] != zlib.crc32(fields):
            continue
        counter, beat_s, progress_s, allowance_s, silence_s, started, ready, state, reason = (
            _FIELDS.unpack(fields)
        )
        if counter and (newest is None or counter > newest.counter):
            newest = Beat(
                counter,
                beat_s,
                progress_s,
                allowance_s,
                silence_s,
                started,
                ready,
                state.rstrip(b"\0").decode(errors="replace"),
                reason.rstrip(b"\0").decode(errors="replace"),
            )
    return newest


def _span(seconds: float) -> str:
    return "no limit" if math.isinf(seconds) else f"{seconds:.1f} s"


def stuck(beat: Beat, now_s: float) -> str:
    """Why the program counts as stuck; empty = it does not. Pure."""
    silent_s = now_s - beat.beat_s
    if silent_s > beat.silence_s:
        return (
            f"its Python has not run for {silent_s:.1f} s while {beat.state} (allowance"
            f" {_span(beat.silence_s)})"
        )
    still_s = now_s - beat.progress_s
    if still_s > beat.allowance_s:
        return (
            f"no progress for {still_s:.1f} s while {beat.state} (allowance"
            f" {_span(beat.allowance_s)})"
        )
    return ""


def answer(path: str, beat: Beat | None, now_s: float) -> tuple[int, str]:
    """(HTTP status, one line) for a probe's path. Pure."""
    if path not in ("/livez", "/readyz", "/startupz", "/healthz"):
        return 404, "unknown path: use /livez, /readyz or /startupz"
    if beat is None:
        return 503, "no heartbeat yet"
    if path == "/startupz":
        good = beat.started
        return (200, "started") if good else (503, f"not started: {beat.state}")
    why = stuck(beat, now_s)
    if why:
        return 503, f"stuck: {why}"
    if path == "/readyz" and not beat.ready:
        return 503, f"not ready: {beat.reason or beat.state}"
    return 200, (
        f"ok: {beat.state}, progress {max(0.0, now_s - beat.progress_s):.1f} s ago (allowance"
        f" {_span(beat.allowance_s)})"
    )


_PHRASES: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}


def respond(request: bytes, beat: Beat | None, now_s: float) -> bytes:
    """The whole HTTP answer to a request's first line. Pure."""
    words = request.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        status, text = 400, "not an HTTP request"
    elif words[0] not in (b"GET", b"HEAD"):
        status, text = 405, "use GET"
    else:
        path = words[1].decode("latin-1").split("?", 1)[0]
        status, text = answer(path, beat, now_s)
    body = b"" if words[0] == b"HEAD" else text.encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {_PHRASES.get(status, 'Service Unavailable')}\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body


class _Client:
    def __init__(self, connection: socket.socket, now_s: float) -> None:
        self.connection = connection
        self.since_s = now_s
        self.received = b""


class ProbeLoop:
    """One thread, no waits on a client: a slow or silent one holds up nobody."""

    def __init__(self, listener: socket.socket, heartbeat: mmap.mmap, parent_fd: int) -> None:
        self._heartbeat = heartbeat
        self._listener = listener
        self._parent_fd = parent_fd
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _Client] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(parent_fd, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until the program's end of the pipe is closed."""
        while True:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fd == self._parent_fd:
                    return  # Nothing is ever written: readable means closed.
                if key.fd == self._listener.fileno():
                    self._accept()
                elif key.fd in self._clients:
                    self._read(key.fd)
            now_s = time.monotonic()
            for fd, client in list(self._clients.items()):
                if now_s - client.since_s > _CLIENT_SECONDS:
                    self._close(fd)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._clients) >= _MAX_CLIENTS:
            self._close(next(iter(self._clients)))  # The oldest.
        connection.setblocking(False)
        self._clients[connection.fileno()] = _Client(connection, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, fd: int) -> None:
        client = self._clients[fd]
        try:
            data = client.connection.recv(_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._close(fd)
            return
        client.received += data
        whole = b"\r\n\r\n" in client.received or b"\n\n" in client.received
        if data and not whole and len(client.received) < _REQUEST_BYTES:
            return
        if client.received:
            beat = unpack(self._heartbeat[:HEARTBEAT_BYTES])
            try:
                # Smaller than any socket buffer: sent at once or not at all.
                client.connection.send(respond(client.received, beat, time.monotonic()))
                client.connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        self._close(fd)

    def _close(self, fd: int) -> None:
        client = self._clients.pop(fd)
        self._selector.unregister(client.connection)
        client.connection.close()


def main(arguments: list[str]) -> int:
    # A terminal's Ctrl-C reaches the whole group: the program drains, and is still probed meanwhile.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listener = socket.socket(fileno=int(arguments[0]))
    heartbeat = mmap.mmap(int(arguments[1]), HEARTBEAT_BYTES, prot=mmap.PROT_READ)
    ProbeLoop(listener, heartbeat, sys.stdin.fileno()).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
