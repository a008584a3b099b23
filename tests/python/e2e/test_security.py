"""TLS, mutual TLS and tokens, with certificates made here."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from local_server import LocalServer

import spmmd

ADMIN = "admin-token-of-sufficient-length"
DATA = "data-token-of-sufficient-length!"


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    pem, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(pem), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return pem, key


@pytest.fixture(scope="module")
def secured(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalServer, spmmd.Tls]]:
    """A server that asks for a client certificate and a token, and settings that satisfy the first."""
    folder = tmp_path_factory.mktemp("tls")
    server_pem, server_key = certificate(folder, "server")
    client_pem, client_key = certificate(folder, "client")
    (folder / "tokens").write_text(f"admin {ADMIN}\ndata {DATA}\n")
    (folder / "tokens").chmod(0o600)
    flags = [f"--tls-cert={server_pem}", f"--tls-key={server_key}", f"--tls-client-ca={client_pem}"]
    flags += [f"--auth-token-file={folder / 'tokens'}"]
    with LocalServer(binary, flags) as server:
        yield server, spmmd.Tls(ca=server_pem, certificate=client_pem, key=client_key.read_bytes())


def test_admin_may_everything(secured: tuple[LocalServer, spmmd.Tls]) -> None:
    server, tls = secured
    with spmmd.Client(server.address, tls=tls, token=ADMIN) as client:
        client.register("w", np.eye(2, dtype=np.float32))
        assert client.matmul("w", np.array([1, 2], np.float32)).tolist() == [1, 2]


async def test_asyncio_takes_the_same_settings(secured: tuple[LocalServer, spmmd.Tls]) -> None:
    server, tls = secured
    async with spmmd.AsyncClient(server.address, tls=tls, token=ADMIN) as client:
        await client.register("async", np.eye(2, dtype=np.float32))
        assert (await client.get("async")).shape == (2, 2)


def test_data_token_may_not_change_what_is_served(secured: tuple[LocalServer, spmmd.Tls]) -> None:
    server, tls = secured
    with spmmd.Client(server.address, tls=tls, token=DATA) as client:
        assert client.server_info().version == spmmd.__version__
        with pytest.raises(spmmd.PermissionDeniedError):
            client.register("mine", np.eye(2, dtype=np.float32))


@pytest.mark.parametrize("token", [None, "wrong-token-of-sufficient-length"])
def test_without_a_good_token(secured: tuple[LocalServer, spmmd.Tls], token: str | None) -> None:
    server, tls = secured
    with spmmd.Client(server.address, tls=tls, token=token) as client, pytest.raises(spmmd.UnauthenticatedError):
        client.server_info()


@pytest.mark.parametrize("kind", ["no client certificate", "unknown server", "plain text"])
def test_without_good_certificates(secured: tuple[LocalServer, spmmd.Tls], kind: str) -> None:
    server, tls = secured
    settings: dict[str, spmmd.Tls | bool] = {
        "no client certificate": spmmd.Tls(ca=tls.ca),
        "unknown server": spmmd.Tls(ca=tls.certificate, certificate=tls.certificate, key=tls.key),
        "plain text": False,
    }
    refused = (spmmd.UnavailableError, spmmd.DeadlineExceededError)
    with spmmd.Client(server.address, tls=settings[kind], token=ADMIN, timeout=5) as client, pytest.raises(refused):
        client.server_info()
