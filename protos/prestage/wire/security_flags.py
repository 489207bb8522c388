"""The flags of certificates and tokens, the same in every program."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from prestage.wire.security import SecurityConfig

TLS_DIR = flags.DEFINE_string(
    "tls_dir",
    "",
    "Folder with tls.crt, tls.key and ca.crt: every gRPC address but a unix socket then takes and"
    " shows certificates of that authority; empty: plain text.",
)
TOKEN_DIR = flags.DEFINE_string(
    "token_dir",
    "",
    "Folder with the files drive, submit and read, one role's token each: every gRPC call then needs"
    " one; empty: none.",
)
SERVER_NAME = flags.DEFINE_string(
    "tls_server_name",
    "",
    "Name in the certificate of the server that this program calls; empty: its address's host.",
)


def security_config(*, insecure: bool) -> SecurityConfig:
    """From the flags."""
    return SecurityConfig(
        tls_dir=Path(TLS_DIR.value) if TLS_DIR.value else None,
        token_dir=Path(TOKEN_DIR.value) if TOKEN_DIR.value else None,
        server_name=SERVER_NAME.value or "",
        insecure=insecure,
    )
