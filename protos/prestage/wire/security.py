"""Who may call what: certificates and tokens of one process, for its servers and its channels.

    security = Security(SecurityConfig(tls_dir=..., token_dir=...))     # raises SecurityError
    guard = security.guard(on_refused)                                  # one per server
    server = make_server(8, name="admin", guard=guard)
    bind(server, "--health_listen", address, guard=guard)
    channel = security.open_channel(address, Role.DRIVE)                # sends the role's token

A server with an interceptor list of its own takes `guard.interceptors()` and
`guard.credentials(address)`. Without flags, `Security()` guards nothing and opens plain channels.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar, cast

import grpc

from prestage.protocol import Reason
from prestage.wire.channel import AddressError, is_local, open_channel, unix_path
from prestage.wire.errors import abort_with
from prestage.wire.secret_files import SecurityError
from prestage.wire.secure_channel import SecureChannel
from prestage.wire.tls_files import TlsFiles
from prestage.wire.token_files import Role, TokenFiles

__all__ = [
    "ALLOWED",
    "Guard",
    "Role",
    "Security",
    "SecurityConfig",
    "SecurityError",
    "check_reachable",
]

log = logging.getLogger("prestage.security")

Q = TypeVar("Q")
P = TypeVar("P")

HEADER: Final = "authorization"
SCHEME: Final = "Bearer "
_DRIVE: Final = frozenset({Role.DRIVE})
_LOOK: Final = frozenset({Role.DRIVE, Role.READ})
_ALL: Final = frozenset(Role)

Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
Behavior: TypeAlias = Callable[[object, grpc.ServicerContext], object]


def _table() -> Mapping[str, frozenset[Role]]:
    trainer = {
        "GetState": _LOOK,
        "GetCapabilities": _LOOK,
        "GetMetrics": _LOOK,
        **dict.fromkeys(
            (
                "OpenRun",
                "Compile",
                "PutMicroBatch",
                "FwdBwd",
                "StageFwdBwd",
                "ApplyDeferredUpdate",
                "Update",
                "SaveCheckpoint",
                "RestoreCheckpoint",
                "AbortStep",
                "PrepareWeightSync",
                "ExportWeights",
                "ReleaseWeightSync",
                "ComputeLogprobs",
                "Evaluate",
            ),
            _DRIVE,
        ),
    }
    services: dict[str, dict[str, frozenset[Role]]] = {
        "prestage.trainer.v1.TrainerWorker": trainer,
        "prestage.trainer.v1.TrainerStatus": {"GetState": _LOOK},
        "prestage.hosts.v1.Hosts": {"Join": _DRIVE, "FetchShard": _DRIVE},
        "prestage.rollout.v1.RolloutIngest": {
            "SubmitTrajectories": frozenset({Role.SUBMIT}),
            "WatchPolicy": frozenset({Role.SUBMIT, Role.READ}),
        },
        "prestage.admin.v1.OrchestratorAdmin": {
            "Status": _LOOK,
            "Pause": _DRIVE,
            "Resume": _DRIVE,
            "Stop": _DRIVE,
        },
        "grpc.health.v1.Health": {"Check": _ALL, "Watch": _ALL, "List": _ALL},
        "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _LOOK},
        "grpc.channelz.v1.Channelz": dict.fromkeys(
            (
                "GetTopChannels",
                "GetServers",
                "GetServer",
                "GetServerSockets",
                "GetChannel",
                "GetSubchannel",
                "GetSocket",
            ),
            _LOOK,
        ),
    }
    return MappingProxyType(
        {
            f"/{service}/{method}": roles
            for service, methods in services.items()
            for method, roles in methods.items()
        }
    )


ALLOWED: Final[Mapping[str, frozenset[Role]]] = _table()
"""Full method name to the roles that may call it. What is not in it is nobody's."""


def check_reachable(flag: str, address: str, *, protected: bool, insecure: bool) -> None:
    """Raises `AddressError` for an address that other hosts reach, without TLS or --insecure."""
    if protected or insecure or is_local(address):
        return
    raise AddressError(
        f"{flag} is {address!r}, which other hosts can reach: give --tls_dir (and --token_dir), use"
        " unix:///path or a loopback address, or say --insecure"
    )


@dataclass(frozen=True, kw_only=True)
class _Refused:
    reason: Reason
    message: str


OnRefused: TypeAlias = Callable[[str, str, Reason], None]
"""Hears of a refusal: service and method (`unknown` when not in the table) and why."""


class Guard(grpc.ServerInterceptor):
    """Decides for one server, before any handler. Safe from any thread; never waits."""

    def __init__(
        self,
        tls: TlsFiles | None = None,
        tokens: TokenFiles | None = None,
        *,
        on_refused: OnRefused = lambda service, method, reason: None,
        allowed: Mapping[str, frozenset[Role]] = ALLOWED,
    ) -> None:
        self._tls = tls
        self._tokens = tokens
        self._on_refused = on_refused
        self._allowed = allowed
        self._lock = threading.Lock()
        self._said: Counter[tuple[str, Reason]] = Counter()
        self.connections = Connections()

    def interceptors(self) -> tuple[grpc.ServerInterceptor, ...]:
        """For `grpc.server`; empty where there is nothing to check."""
        return (self,) if self._tokens is not None or self._tls is not None else ()

    def credentials(self, address: str) -> grpc.ServerCredentials | None:
        """For this address. None = plain text: no TLS here, or a unix socket, whose mode protects it."""
        if self._tls is None or unix_path(address) is not None:
            return None
        return self._tls.server_credentials(self.connections.began)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Q, P] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, P] | None:
        method = handler_call_details.method
        refused = self._judge(method, handler_call_details.invocation_metadata)
        if refused is not None:
            return cast("grpc.RpcMethodHandler[Q, P]", self._refusal(method, refused))
        handler = continuation(handler_call_details)
        if handler is None or self._tls is None:
            return handler
        noting = _noting(cast(Handler, handler), self.connections.used)
        return cast("grpc.RpcMethodHandler[Q, P]", noting)

    def _judge(
        self, method: str, metadata: Sequence[tuple[str, str | bytes]] | None
    ) -> _Refused | None:
        tokens = self._tokens
        if tokens is None:
            return None
        sent = [value for key, value in metadata or () if key == HEADER]
        if len(sent) != 1 or not isinstance(sent[0], str) or not sent[0].startswith(SCHEME):
            return _Refused(
                reason=Reason.UNAUTHENTICATED,
                message=f"{len(sent)} tokens came: send one, as metadata `{HEADER}: {SCHEME}TOKEN`"
                " (our programs: --token_dir)",
            )
        role = tokens.role_of(sent[0].removeprefix(SCHEME))
        if role is None:
            return _Refused(
                reason=Reason.UNAUTHENTICATED,
                message="the token is not one of this server's: it was changed, or is another"
                " deployment's",
            )
        roles = self._allowed.get(method, frozenset())
        if role in roles:
            return None
        may = ", ".join(sorted(role.value for role in roles)) or "nobody"
        return _Refused(
            reason=Reason.PERMISSION_DENIED,
            message=f"the role {role.value} may not call {method[:200]}; {may} may",
        )

    def _refusal(self, method: str, refused: _Refused) -> Handler:
        service, name = "unknown", "unknown"
        if method in self._allowed:
            service, name = method.removeprefix("/").split("/")
        self._on_refused(service, name, refused.reason)

        def refuse(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
            del request
            self._say(context, name, refused)
            abort_with(context, refused.reason, refused.message)

        # Bytes in, a stream out: fits a method of any shape, since all it does is to end the call.
        return cast(Handler, grpc.stream_stream_rpc_method_handler(refuse))

    def _say(self, context: grpc.ServicerContext, name: str, refused: _Refused) -> None:
        with self._lock:
            self._said[name, refused.reason] += 1
            count = self._said[name, refused.reason]
        if count & (count - 1) == 0:  # 1, 2, 4, 8 ...: a flood is told, and does not fill the log.
            log.warning(
                "%s from %s is refused (%d times so far): %s",
                name,
                context.peer(),
                count,
                refused.message,
            )


class Connections:
    """Connections over TLS that began, and those of them that ever carried a call.

    What fails in its handshake (plain text, no certificate, another authority's) never reaches
    Python; it shows as a connection that began and was not used within `USE_S`.
    """

    USE_S: Final = 15.0
    _KEPT: Final = 65_536

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due: deque[list[int]] = deque()  # [second, connections that began in it].
        self._overdue = 0
        self._peers: OrderedDict[str, None] = OrderedDict()
        self._used = 0
        self._refused = 0

    def began(self) -> None:
        second = int(self._clock())
        with self._lock:
            if self._due and self._due[-1][0] == second:
                self._due[-1][1] += 1
            else:
                self._due.append([second, 1])
            self._settle()

    def used(self, peer: str) -> None:
        """A call came over the connection of this peer (its address and port)."""
        with self._lock:
            if peer in self._peers or peer.startswith("unix"):
                return
            self._peers[peer] = None
            self._used += 1
            while len(self._peers) > self._KEPT:
                self._peers.popitem(last=False)

    def _settle(self) -> None:
        at_s = self._clock()
        while self._due and self._due[0][0] + self.USE_S <= at_s:
            self._overdue += self._due.popleft()[1]
        self._refused = max(self._refused, self._overdue - self._used)

    @property
    def refused(self) -> int:
        """Connections that began more than `USE_S` ago and carried no call. Monotonic."""
        with self._lock:
            self._settle()
            return self._refused


def _noting(handler: Handler, used: Callable[[str], None]) -> Handler:
    """The same handler; `used` hears of the peer of each call."""
    if handler.response_streaming:
        behavior = cast(Behavior, handler.stream_stream or handler.unary_stream)
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )

        def many(request: object, context: grpc.ServicerContext) -> Iterator[object]:
            used(context.peer())
            return cast(Iterator[object], behavior(request, context))

        made: object = make(
            many,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
    else:
        behavior = cast(Behavior, handler.stream_unary or handler.unary_unary)
        make_one = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )

        def one(request: object, context: grpc.ServicerContext) -> object:
            used(context.peer())
            return behavior(request, context)

        made = make_one(
            one,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
    return cast(Handler, made)


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Where a process finds its certificates and tokens."""

    tls_dir: Path | None = None  # tls.crt, tls.key, ca.crt; None = plain text.
    token_dir: Path | None = None  # drive, submit, read; None = no tokens.
    server_name: str = ""  # The name in the server's certificate; empty: the address's host.
    insecure: bool = False


class Security:
    """One process's. Safe from any thread."""

    def __init__(self, config: SecurityConfig | None = None) -> None:
        """Reads and checks every file. Raises `SecurityError`."""
        config = config or SecurityConfig()
        self._config = config
        self.tls = None if config.tls_dir is None else TlsFiles(config.tls_dir)
        self.tokens = None if config.token_dir is None else TokenFiles(config.token_dir)
        if self.tls is not None and self.tokens is None:
            log.warning(
                "--tls_dir without --token_dir: whoever has a certificate may call everything"
            )
        if config.insecure:
            log.warning(
                "--insecure: %s",
                "tokens may travel in plain text"
                if self.tokens is not None
                else "whoever reaches this program's addresses may call everything",
            )

    def check_listen(self, flag: str, address: str) -> None:
        """Raises `AddressError` for an address that needs protection and has none."""
        check_reachable(
            flag, address, protected=self.tls is not None, insecure=self._config.insecure
        )

    def guard(self, on_refused: OnRefused = lambda service, method, reason: None) -> Guard:
        """For one server. `on_refused` hears of each refused call; it must not wait."""
        return Guard(self.tls, self.tokens, on_refused=on_refused)

    def open_channel(
        self, flag: str, address: str, role: Role, *, changes: Mapping[str, int] | None = None
    ) -> grpc.Channel:
        """A channel that shows the certificate and sends the role's token.

        `flag`: what gave the address. `changes`: as `channel.open_channel` takes them. Raises `AddressError` for a plain-text one that leaves this
        host, `SecurityError` when the role has no token.
        """
        if self.tls is None and not self._config.insecure and not is_local(address):
            raise AddressError(
                f"{flag} is {address!r}, on another host: give --tls_dir (and --token_dir), or say"
                " --insecure to reach it in plain text"
            )
        tls = self.tls if unix_path(address) is None else None
        tokens = self.tokens
        if tokens is not None:
            tokens.sent_by(role)  # Before the first call, so that a missing file fails the start.
        if tls is None and tokens is None:
            return open_channel(address, changes=changes)

        def open_now() -> tuple[int, grpc.Channel]:
            if tls is None:
                return 0, open_channel(address, changes=changes)
            generation, credentials = tls.channel_credentials()
            return generation, open_channel(
                address, credentials, server_name=self._config.server_name, changes=changes
            )

        def metadata() -> tuple[tuple[str, str | bytes], ...]:
            return () if tokens is None else ((HEADER, SCHEME + tokens.sent_by(role)),)

        return SecureChannel(open_now, lambda: 0 if tls is None else tls.current()[0], metadata)
