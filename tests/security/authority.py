"""A certificate authority for tests, and folders of tokens."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROLES = ("drive", "submit", "read")
DAY = datetime.timedelta(days=1)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(key: ec.EllipticCurvePrivateKey, password: str = "") -> bytes:
    protection: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        protection = serialization.BestAvailableEncryption(password.encode())
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
    )


class Authority:
    """Signs certificates. Every file it writes has the mode that the programs ask for."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        now = datetime.datetime.now(datetime.UTC)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + 100 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def folder(
        self,
        path: Path,
        *,
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
        valid_from: datetime.timedelta = -DAY,
        valid_until: datetime.timedelta = 10 * DAY,
        password: str = "",
    ) -> Path:
        """tls.crt, tls.key and ca.crt of a fresh pair, in `path`."""
        path.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        names: list[x509.GeneralName] = []
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name("prestage"))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + valid_from)
            .not_valid_after(now + valid_until)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        put(path / "tls.crt", certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        put(path / "tls.key", _pem(key, password), 0o600)
        put(path / "ca.crt", self.pem, 0o644)
        return path


def put(path: Path, content: bytes, mode: int) -> None:
    """Replace a file at once, as a mount does."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fresh.write_bytes(content)
    fresh.chmod(mode)
    fresh.rename(path)


def token_folder(path: Path, roles: tuple[str, ...] = ROLES) -> dict[str, str]:
    """One file per role; returns role to token."""
    path.mkdir(parents=True, exist_ok=True)
    tokens = {role: secrets.token_hex(32) for role in roles}
    for role, token in tokens.items():
        put(path / role, f"{token}\n".encode(), 0o600)
    return tokens
