"""What both clients share: channel options, credentials, metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

# Layers' activations pass gRPC's default of 4 MiB easily; the server's own limit is the one that counts.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

DEFAULT_TIMEOUT = 60.0
DEFAULT_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Tls:
    """TLS settings; values are PEM files' paths, or PEM bytes.

    Attributes:
      ca: certificates that sign the server's; None takes the system's.
      certificate, key: the client's own, for mutual TLS; both or neither.
      server_name: the name expected in the server's certificate when it differs from the address.
    """

    ca: str | Path | bytes | None = None
    certificate: str | Path | bytes | None = None
    key: str | Path | bytes | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls: certificate and key go together")
        return grpc.ssl_channel_credentials(_pem(self.ca), _pem(self.key), _pem(self.certificate))


def _pem(value: str | Path | bytes | None) -> bytes | None:
    return Path(value).read_bytes() if isinstance(value, str | Path) else value


def tls_of(tls: Tls | bool) -> Tls | None:
    """None for plain text."""
    if isinstance(tls, Tls):
        return tls
    return Tls() if tls else None


def channel_options(tls: Tls | None) -> list[tuple[str, str | int]]:
    options: list[tuple[str, str | int]] = list(CHANNEL_OPTIONS)
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)
