"""A folder with tls.crt, tls.key and ca.crt: checked at start, read again when it changes.

Files that cannot be used after a change are reported once, and the last good ones stay in use: a
renewal that is half done must not end a run.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from prestage.wire.secret_files import SecurityError, Stamp, read_file, stamp_of

log = logging.getLogger("prestage.security")

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITY: Final = "ca.crt"
NAMES: Final = (CERTIFICATE, KEY, AUTHORITY)
LOOK_S: Final = 5.0
"""How often the folder is looked at, at most."""

Now = Callable[[], datetime.datetime]


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True, kw_only=True)
class TlsIdentity:
    """What one side shows and whom it believes. PEM."""

    certificate: bytes  # Its own first, then those between it and the authority.
    key: bytes = field(repr=False)
    authority: bytes
    subject: str
    names: tuple[str, ...]  # Host names and addresses that it answers to.
    expires_at: datetime.datetime


def load_identity(folder: Path, *, flag: str = "--tls_dir", now: Now = utc_now) -> TlsIdentity:
    """Read and check the three files. Raises `SecurityError` naming the file and the fix."""
    if not folder.is_dir():
        raise SecurityError(
            f"{flag} is {str(folder)!r}, which is no folder: give one with {', '.join(NAMES)}"
        )
    certificate = read_file(flag, folder / CERTIFICATE, secret=False)
    key = read_file(flag, folder / KEY, secret=True)
    authority = read_file(flag, folder / AUTHORITY, secret=False)
    chain = _certificates(flag, folder / CERTIFICATE, certificate)
    trusted = _certificates(flag, folder / AUTHORITY, authority)
    own = chain[0]
    _check_key(flag, folder, own, key)
    for path, items in ((folder / CERTIFICATE, chain), (folder / AUTHORITY, trusted)):
        for item in items:
            _check_dates(flag, path, item, now())
    if not _issued_by(own, [*chain[1:], *trusted]):
        log.warning(
            "%s: %s was not issued by an authority in %s: programs with this same %s refuse it",
            flag,
            folder / CERTIFICATE,
            AUTHORITY,
            AUTHORITY,
        )
    return TlsIdentity(
        certificate=certificate,
        key=key,
        authority=authority,
        subject=own.subject.rfc4514_string()[:200],
        names=_names(own),
        expires_at=min(item.not_valid_after_utc for item in chain),
    )


def _certificates(flag: str, path: Path, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise SecurityError(f"{flag}: {path} holds no certificate in PEM form") from error


def _check_key(flag: str, folder: Path, own: x509.Certificate, key: bytes) -> None:
    path = folder / KEY
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except TypeError:
        raise SecurityError(
            f"{flag}: {path} is encrypted: nobody is there to type its passphrase, store it plain"
            " with mode 0600"
        ) from None
    except Exception:  # What the library says of a damaged key may quote it.
        raise SecurityError(f"{flag}: {path} holds no private key in PEM form") from None
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    if private.public_key().public_bytes(
        serialization.Encoding.DER, public
    ) != own.public_key().public_bytes(serialization.Encoding.DER, public):
        raise SecurityError(
            f"{flag}: {KEY} is not the key of {CERTIFICATE} in {folder}: give both of one pair"
        )


def _check_dates(flag: str, path: Path, item: x509.Certificate, now: datetime.datetime) -> None:
    name = item.subject.rfc4514_string()[:200]
    if item.not_valid_after_utc <= now:
        raise SecurityError(
            f"{flag}: {path} holds {name}, which expired at {item.not_valid_after_utc:%Y-%m-%d %H:%M}"
            f" UTC (now {now:%Y-%m-%d %H:%M}): renew it"
        )
    if item.not_valid_before_utc > now:
        raise SecurityError(
            f"{flag}: {path} holds {name}, which is valid only from"
            f" {item.not_valid_before_utc:%Y-%m-%d %H:%M} UTC (now {now:%Y-%m-%d %H:%M}): correct"
            " this host's clock, or the certificate"
        )


def _issued_by(own: x509.Certificate, others: Sequence[x509.Certificate]) -> bool:
    for other in others:
        try:
            own.verify_directly_issued_by(other)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return True
    return False


def _names(own: x509.Certificate) -> tuple[str, ...]:
    try:
        found = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    hosts = found.get_values_for_type(x509.DNSName)
    addresses = found.get_values_for_type(x509.IPAddress)
    return (*hosts, *(str(address) for address in addresses))


class TlsFiles:
    """The folder over time. Safe from any thread."""

    def __init__(
        self,
        folder: Path,
        *,
        flag: str = "--tls_dir",
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
        now: Now = utc_now,
    ) -> None:
        """Raises `SecurityError` for files that cannot be used."""
        self._folder = folder
        self._flag = flag
        self._look_s = look_s
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._stamp: Stamp = stamp_of(folder, NAMES)
        self._identity = load_identity(folder, flag=flag, now=now)
        self._looked_s = clock()
        self._generation = 1
        self._failures = 0

    def current(self) -> tuple[int, TlsIdentity]:
        """(generation, identity): what to use now. The generation grows with each change."""
        with self._lock:
            self._look()
            return self._generation, self._identity

    def _look(self) -> None:
        at_s = self._clock()
        if at_s - self._looked_s < self._look_s:
            return
        self._looked_s = at_s
        stamp = stamp_of(self._folder, NAMES)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            identity = load_identity(self._folder, flag=self._flag, now=self._now)
        except SecurityError as error:
            self._failures += 1
            log.error(
                "the changed certificate is not used; the one that expires at %s stays: %s",
                self._identity.expires_at.isoformat(),
                error,
            )
            return
        self._identity = identity
        self._generation += 1
        log.info(
            "a new certificate is in use: %s, until %s",
            identity.subject,
            identity.expires_at.isoformat(),
        )

    @property
    def expires_at_s(self) -> float:
        """Unix time at which the certificate in use expires."""
        return self.current()[1].expires_at.timestamp()

    @property
    def failed_reloads(self) -> int:
        """Changes of the folder that could not be used. Monotonic."""
        return self._failures

    def server_credentials(
        self, on_connection: Callable[[], None] = lambda: None
    ) -> grpc.ServerCredentials:
        """For servers: every client shows a certificate. Follows the files.

        `on_connection` hears of each connection before its handshake; it must not wait.
        """
        generation, identity = self.current()
        served = [generation]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            # gRPC asks at each new connection, before its handshake.
            on_connection()
            with self._lock:
                self._look()
                if self._generation == served[0]:
                    return None
                served[0] = self._generation
                return _configuration(self._identity)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(identity),
            # None means "unchanged", which the type stubs do not know.
            cast(Callable[[], grpc.ServerCertificateConfiguration], fetch),
            require_client_authentication=True,
        )

    def channel_credentials(self) -> tuple[int, grpc.ChannelCredentials]:
        """(generation, credentials) for one channel, of the files as they are now."""
        generation, identity = self.current()
        return generation, grpc.ssl_channel_credentials(
            root_certificates=identity.authority,
            private_key=identity.key,
            certificate_chain=identity.certificate,
        )


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], root_certificates=identity.authority
    )
