"""Certificates and tokens that cannot be used are one clear error, before anything listens."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from prestage.wire.secret_files import SecurityError
from prestage.wire.security import Security, SecurityConfig
from prestage.wire.tls_files import TlsFiles, load_identity
from prestage.wire.token_files import Role, TokenFiles, load_tokens
from tests.security.authority import DAY, Authority, put, token_folder


def _no_key(folder: Path, other: Path) -> None:
    (folder / "tls.key").unlink()


def _other_key(folder: Path, other: Path) -> None:
    put(folder / "tls.key", (other / "tls.key").read_bytes(), 0o600)


def _garbage_key(folder: Path, other: Path) -> None:
    put(folder / "tls.key", b"-----BEGIN PRIVATE KEY-----\nSECRETSECRET\n", 0o600)


def _garbage_certificate(folder: Path, other: Path) -> None:
    put(folder / "tls.crt", b"no certificate", 0o644)


def _readable_key(folder: Path, other: Path) -> None:
    (folder / "tls.key").chmod(0o644)


def _writable_authority(folder: Path, other: Path) -> None:
    (folder / "ca.crt").chmod(0o666)


def _pipe(folder: Path, other: Path) -> None:
    (folder / "ca.crt").unlink()
    os.mkfifo(folder / "ca.crt", 0o600)


def _huge(folder: Path, other: Path) -> None:
    put(folder / "ca.crt", b"x" * (2 << 20), 0o644)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_no_key, r"tls\.key cannot be read"),
        (_other_key, r"tls\.key is not the key of tls\.crt"),
        (_garbage_key, r"tls\.key holds no private key"),
        (_garbage_certificate, r"tls\.crt holds no certificate"),
        (_readable_key, r"tls\.key has mode 0644.*chmod o-r"),
        (_writable_authority, r"ca\.crt has mode 0666.*chmod go-w"),
        (_pipe, r"ca\.crt is not a plain file"),
        (_huge, r"ca\.crt has more than"),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, damage: Callable[[Path, Path], None], says: str
) -> None:
    authority = Authority()
    folder = authority.folder(tmp_path / "tls")
    assert load_identity(folder).names == ("localhost", "127.0.0.1")
    damage(folder, authority.folder(tmp_path / "other"))
    with pytest.raises(SecurityError, match=f"(?s)--tls_dir: .*{says}") as error:
        load_identity(folder)
    assert "SECRET" not in repr(error.value)


def test_dates(tmp_path: Path) -> None:
    authority = Authority()
    with pytest.raises(SecurityError, match=r"tls\.crt holds CN=prestage, which expired at"):
        load_identity(authority.folder(tmp_path / "old", valid_from=-3 * DAY, valid_until=-2 * DAY))
    with pytest.raises(SecurityError, match=r"valid only from .* clock"):
        load_identity(authority.folder(tmp_path / "young", valid_from=DAY))
    with pytest.raises(SecurityError, match=r"ca\.crt holds CN=test authority, which expired"):
        folder = authority.folder(tmp_path / "long", valid_until=300 * DAY)
        load_identity(folder, now=lambda: datetime.datetime.now(datetime.UTC) + 200 * DAY)
    with pytest.raises(SecurityError, match="no folder"):
        load_identity(tmp_path / "nowhere")


def test_an_encrypted_key_asks_nobody_for_its_passphrase(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=r"tls\.key is encrypted"):
        load_identity(Authority().folder(tmp_path, password="open sesame"))


def test_another_authority_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Authority().folder(tmp_path)
    put(folder / "ca.crt", Authority("other").pem, 0o644)
    with caplog.at_level(logging.WARNING):
        load_identity(folder)
    assert "was not issued by an authority in ca.crt" in caplog.text


def test_a_renewal_is_seen_and_a_broken_one_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority()
    folder = authority.folder(tmp_path / "tls")
    at = [0.0]
    files = TlsFiles(folder, look_s=5.0, clock=lambda: at[0])
    generation, first = files.current()
    put(folder / "tls.crt", (authority.folder(tmp_path / "new") / "tls.crt").read_bytes(), 0o644)
    assert files.current() == (generation, first), "not looked at yet"
    at[0] = 5.0
    with caplog.at_level(logging.ERROR):
        assert files.current() == (generation, first), "half a renewal"
        at[0] = 10.0
        assert files.current() == (generation, first)
    assert caplog.text.count("is not the key of") == 1
    assert files.failed_reloads == 1
    put(folder / "tls.key", (tmp_path / "new" / "tls.key").read_bytes(), 0o600)
    at[0] = 15.0
    after, second = files.current()
    assert after == generation + 1
    assert second.certificate == (tmp_path / "new" / "tls.crt").read_bytes()


# -- tokens ---------------------------------------------------------------------------------------


def test_tokens_are_whose_they_are(tmp_path: Path) -> None:
    tokens = token_folder(tmp_path)
    files = TokenFiles(tmp_path)
    for role in Role:
        assert files.role_of(tokens[role.value]) is role
        assert files.sent_by(role) == tokens[role.value]
    wrong = tokens["drive"][:-1] + ("0" if tokens["drive"][-1] != "0" else "1")
    for guess in ("", wrong, tokens["drive"] + "0", "drive", "é" * 40):
        assert files.role_of(guess) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"short", "token 1 in .*drive has 5 characters"),
        (b"", "holds 0 tokens"),
        (b"s3cr3t-with-spaces in it, long enough", "other than"),
        (b"s3cr3t" + bytes([0xFF]) * 40, "not plain text"),
        (b"\n".join(b"s3cr3t-%060d" % n for n in range(9)), "holds 9 tokens"),
    ],
)
def test_tokens_that_cannot_be_used(tmp_path: Path, content: bytes, says: str) -> None:
    put(tmp_path / "drive", content, 0o600)
    with pytest.raises(SecurityError, match=says) as error:
        load_tokens(tmp_path)
    assert "s3cr3t" not in str(error.value)


def test_token_files_that_others_can_read_are_refused(tmp_path: Path) -> None:
    token_folder(tmp_path)
    (tmp_path / "read").chmod(0o440)  # A mounted Secret's mode.
    load_tokens(tmp_path)
    (tmp_path / "read").chmod(0o604)
    with pytest.raises(SecurityError, match="read has mode 0604"):
        load_tokens(tmp_path)


def test_one_token_for_two_roles_is_refused(tmp_path: Path) -> None:
    tokens = token_folder(tmp_path)
    put(tmp_path / "read", tokens["submit"].encode(), 0o600)
    with pytest.raises(SecurityError, match=r"submit and read .* the same token") as error:
        load_tokens(tmp_path)
    assert tokens["submit"] not in str(error.value)


def test_no_token_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="none of the files"):
        load_tokens(tmp_path)


def test_a_token_changes_without_a_refusal(tmp_path: Path) -> None:
    """New as a second line, then first, then alone: both sides always share a line."""
    old, new = "o" * 40, "n" * 40
    at = [0.0]
    put(tmp_path / "drive", old.encode(), 0o600)
    files = TokenFiles(tmp_path, look_s=1.0, clock=lambda: at[0])
    for lines, sent in (([old, new], old), ([new, old], new), ([new], new)):
        put(tmp_path / "drive", "\n".join(lines).encode(), 0o600)
        at[0] += 1.0
        assert files.sent_by(Role.DRIVE) == sent
        assert [files.role_of(token) for token in (old, new)] == [
            Role.DRIVE if token in lines else None for token in (old, new)
        ]


def test_no_secret_shows_in_a_repr(tmp_path: Path) -> None:
    tokens = token_folder(tmp_path / "tokens")
    tls = Authority().folder(tmp_path / "tls")
    key = (tls / "tls.key").read_text()
    security = Security(SecurityConfig(tls_dir=tls, token_dir=tmp_path / "tokens"))
    shown = "".join(
        repr(item)
        for item in (
            security,
            vars(security),
            security.tls and security.tls.current(),
            load_tokens(tmp_path / "tokens"),
            security.guard(),
            vars(security.guard()),
        )
    )
    assert key.splitlines()[1] not in shown
    assert not [token for token in tokens.values() if token in shown]
