"""What both clients share: channel options, credentials, metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from spmmd._proto.sparse_matmul_pb2 import ExecuteRequest, Program, RegisterProgramRequest

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


# Every address of the name in turn, without those whose health says that they are not serving. What only multiplies is
# safe to send again when a server went away under it; the attempts together outlast a look-up of the name: when the
# last server that is known drains, those that came meanwhile are found by it.
_BALANCE = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": ""},
        "methodConfig": [
            {
                "name": [{"service": "spmm.v1.SparseMatmul", "method": "Execute"}],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
    }
)


def channel_options(tls: Tls | None, balance: bool = False) -> list[tuple[str, str | int]]:
    options: list[tuple[str, str | int]] = list(CHANNEL_OPTIONS)
    if balance:
        options += [
            ("grpc.service_config", _BALANCE),
            # gRPC's own 30 s between look-ups and up to 120 s between attempts are longer than a rollout takes.
            ("grpc.dns_min_time_between_resolutions_ms", 1000),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5000),
        ]
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


Metadata = tuple[tuple[str, str], ...]


def with_layer(metadata: Metadata, layer: str) -> Metadata:
    """The metadata of a call on a layer: gateways route by it to the layer's shard."""
    return (*metadata, ("spmmd-layer", layer)) if layer else metadata


def first_layer(program: Program) -> str:
    """The layer of a program's first matmul; empty when it has none."""
    return next((step.matmul.layer.name for step in program.steps if step.HasField("matmul")), "")


def layer_of(request: Any) -> str:
    """The layer that a request names, the first one of a program; empty when there is none."""
    if isinstance(request, ExecuteRequest | RegisterProgramRequest):
        return first_layer(request.program)
    layer = getattr(request, "layer", None)
    return str(layer.name) if layer is not None else ""


def call_metadata(token: str | None) -> Metadata:
    return () if token is None else (("authorization", f"Bearer {token}"),)
