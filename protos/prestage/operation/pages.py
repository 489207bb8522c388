"""A small HTTP server for read-only pages: metrics, status. Its own threads; bounded; GET only."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from prestage.operation.addresses import listen_tcp, port_of

log = logging.getLogger("prestage.operation")

MAX_REQUESTS: Final = 16
"""At a time; more connections are closed at once."""
CLIENT_SECONDS: Final = 10.0

Request: TypeAlias = "socket.socket | tuple[bytes, socket.socket]"
Page: TypeAlias = Callable[[], tuple[str, bytes]]
"""Makes (content type, body)."""


def metrics_page(registry: CollectorRegistry) -> Page:
    """`/metrics` of a registry."""
    return lambda: (CONTENT_TYPE_LATEST, generate_latest(registry))


class PageServer:
    """Serves pages by path."""

    def __init__(self, flag: str, place: tuple[str, int], pages: Mapping[str, Page]) -> None:
        """Binds at once. Raises `AddressError` naming `flag`."""
        listener = listen_tcp(flag, *place)
        room = threading.BoundedSemaphore(MAX_REQUESTS)

        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_SECONDS
            protocol_version = "HTTP/1.0"  # One request a connection: nothing is held open.

            def do_GET(self) -> None:
                page = pages.get(self.path.partition("?")[0])
                if page is None:
                    self._answer(404, "text/plain", b"unknown page\n")
                    return
                try:
                    kind, body = page()
                except Exception:  # A page's bug is the page's: the program goes on.
                    log.exception("the page %s could not be made", self.path)
                    self._answer(500, "text/plain", b"the page could not be made\n")
                    return
                self._answer(200, kind, body)

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                # A page loads nothing from elsewhere and cannot be framed.
                self.send_header(
                    "Content-Security-Policy",
                    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
                    " connect-src 'self'; base-uri 'none'; form-action 'none';"
                    " frame-ancestors 'none'",
                )
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                del format, args  # A scrape every 15 s is no news.

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def process_request(self, request: Request, client_address: object) -> None:
                if room.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Request, client_address: object) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    room.release()

            def handle_error(self, request: object, client_address: object) -> None:
                del request
                log.debug("a client of %s left: %s", flag, client_address, exc_info=True)

        self._server = Server(listener.getsockname()[:2], Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self.port = port_of(listener)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="pages",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
