"""`python -m tests.chaos.orchestrator FOLDER FLAGS...`: the real orchestrator, its calls disturbed."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc

from orchestrator import app as application
from orchestrator import main as program
from orchestrator.journal import open as journal
from orchestrator.journal.log import DurableLog
from orchestrator.trainer_client import Deadlines, TrainerClient
from tests.chaos.faults import ACK, JOURNAL, SUBMIT, Action, Fault, Injector

Continue = Callable[[object, object], grpc.Call]
MID_FLIGHT_SECONDS = 0.003
SHORT = Deadlines(train_s=0.4, save_s=0.4, read_s=0.4, state_s=0.4)


class Disturbing(grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor):  # type: ignore[misc]
    """Every call of the orchestrator to its worker."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._again: Callable[[], object] | None = None
        self._calls_left = 0

    def intercept_unary_unary(self, continuation, details, request):  # type: ignore[no-untyped-def]
        return self._call(continuation, details, lambda: request)

    def intercept_stream_unary(self, continuation, details, requests):  # type: ignore[no-untyped-def]
        # The sender yields its chunks from the micro-batch's own memory: a list of them holds.
        fault = self._injector.due(_method(details))
        if fault is None:
            self._late()
            return continuation(details, requests)
        kept = list(requests)
        return self._disturbed(fault, continuation, details, lambda: iter(kept))

    def _call(self, continuation: Continue, details, make):  # type: ignore[no-untyped-def]
        fault = self._injector.due(_method(details))
        if fault is None:
            self._late()
            return continuation(details, make())
        return self._disturbed(fault, continuation, details, make)

    def _late(self) -> None:
        """A request that comes again, two calls later."""
        if self._again is None:
            return
        self._calls_left -= 1
        if self._calls_left <= 0:
            again, self._again = self._again, None
            again()

    def _disturbed(  # type: ignore[no-untyped-def]
        self, fault: Fault, continuation: Continue, details, make
    ):
        injector = self._injector

        def once_more() -> object:
            return continuation(details, make())

        match fault.action:
            case Action.CALLER_KILL_BEFORE:
                injector.kill("orchestrator")
            case Action.CALLER_KILL_DURING:
                injector.later(MID_FLIGHT_SECONDS, lambda: injector.kill("orchestrator"))
            case Action.CALLER_STOP:
                injector.stop(fault.seconds)
            case Action.DUPLICATE:
                once_more()
            case Action.DUPLICATE_AT_ONCE:
                threading.Thread(target=once_more, daemon=True).start()
            case Action.DUPLICATE_LATE:
                self._again, self._calls_left = once_more, 2
        answer = continuation(details, make())
        if fault.action is Action.CALLER_KILL_AFTER:
            injector.kill("orchestrator")
        return answer


class AtIntake(grpc.ServerInterceptor):  # type: ignore[misc]
    """Every message of a producer's stream, both ways."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        handler = continuation(details)
        if handler is None or not details.method.endswith("/SubmitTrajectories"):
            return handler
        inner = handler.stream_stream

        def behavior(requests, context):  # type: ignore[no-untyped-def]
            def arriving():  # type: ignore[no-untyped-def]
                for request in requests:
                    fault = self._happens(SUBMIT, context)
                    yield request
                    self._after(fault)

            for answer in inner(arriving(), context):
                fault = self._happens(ACK, context)
                yield answer
                self._after(fault)

        return grpc.stream_stream_rpc_method_handler(
            behavior,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _happens(self, method: str, context: grpc.ServicerContext) -> Fault | None:
        fault = self._injector.due(method)
        if fault is None:
            return None
        match fault.action:
            case Action.CALLER_KILL_BEFORE:
                self._injector.kill("orchestrator")
            case Action.PRODUCER_KILL:
                self._injector.kill("producer")
            case Action.CALLER_STOP:
                self._injector.stop(fault.seconds)
            case Action.STREAM_BROKEN:
                context.cancel()
        return fault

    def _after(self, fault: Fault | None) -> None:
        """Once the message was taken by whom it is for."""
        if fault is not None and fault.action is Action.CALLER_KILL_AFTER:
            self._injector.kill("orchestrator")


class JournalProbe:
    """Hears of every durable operation of the journal before it happens."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._full_until_s = 0.0

    def __call__(self, operation: str) -> None:
        fault = self._injector.due(JOURNAL + operation)
        if fault is not None and fault.action is Action.CALLER_KILL_BEFORE:
            self._injector.kill("orchestrator")
        if fault is not None and fault.action is Action.JOURNAL_FULL:
            self._full_until_s = time.monotonic() + fault.seconds
        if operation != "payload.unlink" and time.monotonic() < self._full_until_s:
            raise OSError(errno.ENOSPC, "No space left on device")


def _method(details: object) -> str:
    method = details.method  # type: ignore[attr-defined]
    text = method.decode() if isinstance(method, bytes) else str(method)
    return text.rpartition("/")[2]


def main() -> None:
    folder = Path(sys.argv[1])
    sys.argv = ["orchestrator", *sys.argv[2:]]
    injector = Injector(folder, "orchestrator")

    real = grpc.insecure_channel

    def opened(target: str, **options: object) -> grpc.Channel:
        return grpc.intercept_channel(real(target, **options), Disturbing(injector))  # type: ignore[arg-type]

    real_server = grpc.server

    def served(*arguments: object, **options: object) -> grpc.Server:
        given = options.pop("interceptors", ())
        options["interceptors"] = [*given, AtIntake(injector)]  # type: ignore[misc]
        return real_server(*arguments, **options)  # type: ignore[arg-type]

    grpc.insecure_channel = opened  # type: ignore[assignment]
    grpc.server = served  # type: ignore[assignment]
    journal.DurableLog = partial(DurableLog, probe=JournalProbe(injector))  # type: ignore[misc, assignment]
    if any(fault.action.needs_deadline for fault in injector.faults):
        application.TrainerClient = partial(TrainerClient, deadlines=SHORT)  # type: ignore[misc, assignment]
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    program.run()


if __name__ == "__main__":
    main()
