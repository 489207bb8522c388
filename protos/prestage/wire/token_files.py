"""A folder with one file per role (drive, submit, read), each with that role's tokens.

Every line of a file is accepted; the first is the one that is sent. So a token is changed without a
refusal: add the new one as a second line everywhere, then make it the first, then take out the old.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prestage.wire.secret_files import SecurityError, Stamp, read_file, stamp_of

log = logging.getLogger("prestage.security")

MIN_CHARACTERS: Final = 32
MAX_CHARACTERS: Final = 512
MAX_TOKENS: Final = 8
LOOK_S: Final = 5.0
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+\Z")


class Role(enum.Enum):
    """What a caller may do; the value is its file's name."""

    DRIVE = "drive"  # Train: every call of a trainer, and the admin port.
    SUBMIT = "submit"  # Send rollouts and watch the policy.
    READ = "read"  # Look: state, health, status.


NAMES: Final = tuple(role.value for role in Role)


@dataclass(frozen=True, kw_only=True)
class RoleTokens:
    """One role's."""

    sent: str = field(repr=False)
    digests: tuple[bytes, ...] = field(repr=False)  # SHA-256 of every accepted one.


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def load_tokens(folder: Path, *, flag: str = "--token_dir") -> dict[Role, RoleTokens]:
    """Read and check the files. A role without a file is nobody's. Raises `SecurityError`.

    No error says anything of a token but its length.
    """
    if not folder.is_dir():
        raise SecurityError(
            f"{flag} is {str(folder)!r}, which is no folder: give one with {', '.join(NAMES)}"
        )
    found: dict[Role, RoleTokens] = {}
    owners: dict[bytes, Role] = {}
    for role in Role:
        path = folder / role.value
        if not path.exists():
            continue
        tokens = _tokens_of(flag, path)
        digests = tuple(_digest(token) for token in tokens)
        for digest in digests:
            other = owners.setdefault(digest, role)
            if other is not role:
                raise SecurityError(
                    f"{flag}: {other.value} and {role.value} in {folder} hold the same token, so"
                    " that one role could do what the other may: make one for each"
                )
        found[role] = RoleTokens(sent=tokens[0], digests=digests)
    if not found:
        raise SecurityError(
            f"{flag}: {folder} holds none of the files {', '.join(NAMES)}: put a token into each"
        )
    return found


def _tokens_of(flag: str, path: Path) -> list[str]:
    try:
        text = read_file(flag, path, secret=True).decode("ascii")
    except UnicodeDecodeError:
        raise SecurityError(f"{flag}: {path} is not plain text: one token a line") from None
    tokens = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise SecurityError(
            f"{flag}: {path} holds {len(tokens)} tokens; write 1 to {MAX_TOKENS}, one a line"
        )
    for number, token in enumerate(tokens, 1):
        if not MIN_CHARACTERS <= len(token) <= MAX_CHARACTERS:
            raise SecurityError(
                f"{flag}: token {number} in {path} has {len(token)} characters; use"
                f" {MIN_CHARACTERS} to {MAX_CHARACTERS}, for example `openssl rand -hex 32`"
            )
        if not _TOKEN.match(token):
            raise SecurityError(
                f"{flag}: token {number} in {path} has characters other than A-Z a-z 0-9 ._~+/=-"
            )
    return tokens


class TokenFiles:
    """The folder over time. Safe from any thread."""

    def __init__(
        self,
        folder: Path,
        *,
        flag: str = "--token_dir",
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `SecurityError` for files that cannot be used."""
        self._folder = folder
        self._flag = flag
        self._look_s = look_s
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp: Stamp = stamp_of(folder, NAMES)
        self._tokens = load_tokens(folder, flag=flag)
        self._looked_s = clock()

    def role_of(self, token: str) -> Role | None:
        """Whose token this is. Takes as long for every wrong one."""
        digest = _digest(token)
        found: Role | None = None
        for role, tokens in self._current().items():
            for known in tokens.digests:
                if hmac.compare_digest(digest, known):
                    found = role
        return found

    def sent_by(self, role: Role) -> str:
        """What a client of this role sends. Raises `SecurityError` without its file."""
        tokens = self._current().get(role)
        if tokens is None:
            raise SecurityError(
                f"{self._flag}: {self._folder / role.value} is missing: this program needs the"
                f" token of the role {role.value}"
            )
        return tokens.sent

    def roles(self) -> frozenset[Role]:
        """Roles that have a token."""
        return frozenset(self._current())

    def _current(self) -> dict[Role, RoleTokens]:
        with self._lock:
            at_s = self._clock()
            if at_s - self._looked_s >= self._look_s:
                self._looked_s = at_s
                self._look()
            return self._tokens

    def _look(self) -> None:
        stamp = stamp_of(self._folder, NAMES)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = load_tokens(self._folder, flag=self._flag)
        except SecurityError as error:
            log.error("the changed tokens are not used; the former ones stay: %s", error)
            return
        log.info("the tokens changed; roles: %s", ", ".join(role.value for role in self._tokens))
