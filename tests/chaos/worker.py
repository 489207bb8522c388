"""`python -m tests.chaos.worker FOLDER FLAGS...`: the real worker with faults in its handlers."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.chaos.faults import Action, Fault, Injector
from trainer_worker import main as program

Behavior = Callable[[object, grpc.ServicerContext], object]
SUCCESSOR_SECONDS = 10.0


def close_connections(address: str) -> int:
    """Shut down every connection that was accepted at a unix address. How many."""
    path = address.removeprefix("unix://")
    inodes = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split()
        # State 03 is connected; the listening socket itself is 01.
        if parts[-1] == path and parts[5] == "03":
            inodes.add(f"socket:[{parts[6]}]")
    closed = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target in inodes:
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            closed += 1
    return closed


@dataclass
class Disturbing(grpc.ServerInterceptor):  # type: ignore[misc]
    """Wraps every handler of the main port."""

    injector: Injector
    address: str

    def __post_init__(self) -> None:
        self.opened = 0
        self.changed = threading.Condition()

    def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        handler = continuation(details)
        if handler is None or handler.response_streaming:
            return handler
        method = details.method.rpartition("/")[2]
        inner = handler.stream_unary or handler.unary_unary

        def behavior(request: object, context: grpc.ServicerContext) -> object:
            fault = self.injector.due(method)
            if fault is None:
                answer = inner(request, context)
            else:
                answer = self.disturbed(fault, inner, request, context)
            if method == "OpenRun":
                with self.changed:
                    self.opened += 1
                    self.changed.notify_all()
            return answer

        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            behavior,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def disturbed(
        self, fault: Fault, inner: Behavior, request: object, context: grpc.ServicerContext
    ) -> object:
        injector = self.injector
        match fault.action:
            case Action.KILL_BEFORE:
                injector.kill("worker")
            case Action.KILL_BOTH_BEFORE:
                injector.kill("orchestrator", "worker")
            case Action.STOP:
                injector.stop(fault.seconds)
            case Action.DROP_REQUEST:
                # As a transport would say it: without the worker's own error details.
                context.abort(grpc.StatusCode.UNAVAILABLE, "chaos: the request was dropped")
            case Action.DELAY_REQUEST:
                time.sleep(fault.seconds)
            case Action.DISCONNECT_BEFORE:
                close_connections(self.address)
            case Action.KILL_LATER:
                injector.later(fault.seconds, lambda: injector.kill("worker"))
            case Action.ORPHAN:
                request = list(request) if hasattr(request, "__next__") else request  # type: ignore[call-overload]
                with self.changed:
                    before = self.opened
                    injector.kill("orchestrator")
                    self.changed.wait_for(lambda: self.opened > before, SUCCESSOR_SECONDS)
                if isinstance(request, list):
                    request = iter(request)
        answer = inner(request, context)
        match fault.action:
            case Action.KILL_AFTER:
                injector.kill("worker")
            case Action.KILL_BOTH_AFTER:
                injector.kill("orchestrator", "worker")
            case Action.DROP_REPLY:
                context.abort(grpc.StatusCode.UNAVAILABLE, "chaos: the reply was dropped")
            case Action.DELAY_REPLY:
                time.sleep(fault.seconds)
            case Action.DISCONNECT_AFTER:
                close_connections(self.address)
        return answer


def main() -> None:
    folder = Path(sys.argv[1])
    sys.argv = ["trainer_worker", *sys.argv[2:]]
    address = next(flag for flag in sys.argv if flag.startswith("--listen=")).partition("=")[2]
    injector = Injector(folder, "worker")

    real = grpc.server

    def made(pool: futures.ThreadPoolExecutor, **options: object) -> grpc.Server:
        """The status port's server stays as it is."""
        if pool._thread_name_prefix == "rpc":  # type: ignore[attr-defined]
            given = options.pop("interceptors", ())
            options["interceptors"] = [*given, Disturbing(injector, address)]  # type: ignore[misc]
        return real(pool, **options)  # type: ignore[arg-type]

    grpc.server = made  # type: ignore[assignment]
    program.run()


if __name__ == "__main__":
    main()
