"""Packed-layer files from Python: packed and inspected by spmmctl, read by the package itself."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import BLOCK, REPOSITORY, sparse_weight
from local_server import LocalServer

import spmmd

FORMATS = ("bitmap", "bitmap_gpu", "row_stream", "column_piece", "three_layer", "rlc_csc", "dense", "csr", "coo")


@pytest.fixture(autouse=True)
def spmmctl(binary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = Path(os.environ.get("SPMMCTL", binary.parent / "spmmctl"))
    monkeypatch.setenv("SPMMCTL", str(program))
    return program


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_reads_back_as_spmmctl_says(format: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weight = sparse_weight(rng, 130, 300, ml_dtypes.bfloat16)
    path = tmp_path / "w.spmmpk"
    packed = spmmd.pack(weight, path, format=format, bias=np.arange(130, dtype=np.float32))
    assert (packed.m, packed.k, packed.dtype, packed.format) == (130, 300, spmmd.DType.BF16, format.upper())
    assert packed.nnz == np.count_nonzero(weight)
    assert packed.metadata == {"source": "array", "pruning": "none"}
    assert packed.density is None
    assert list(tmp_path.iterdir()) == [path], "the array's temporary file is gone"

    seen = spmmd.inspect(path)
    assert seen.bytes == packed.bytes == seen.values_bytes + seen.metadata_bytes + seen.padding_bytes
    assert seen.file_bytes == path.stat().st_size
    with spmmd.PackedFile(path) as file:
        file.verify()
        assert (file.m, file.k, file.dtype, file.nnz) == (seen.m, seen.k, seen.dtype, seen.nnz)
        assert (file.format, file.layout_version, file.bytes) == (seen.format, seen.layout_version, seen.bytes)
        assert file.sections == seen.sections
        assert file.metadata == seen.metadata
        assert file.dense_bytes == 130 * 300 * 2
        assert file.sparsity == pytest.approx(seen.sparsity)
        bias = file.bias
        assert bias is not None
        np.testing.assert_array_equal(bias, np.arange(130, dtype=np.float32))
        for section in file.sections:
            assert file.section(section.name).nbytes == section.bytes
        with pytest.raises(KeyError):
            file.section("nothing")


def test_sections_are_the_layout_that_their_header_specifies(tmp_path: Path) -> None:
    weight = sparse_weight(np.random.default_rng(2), 9, 20, np.float32)
    spmmd.pack(weight, tmp_path / "w.spmmpk", format="csr")
    with spmmd.PackedFile(tmp_path / "w.spmmpk") as file:
        offsets = file.section("row_offsets").view(np.uint64)
        rows = np.repeat(np.arange(9), (offsets[1:] - offsets[:-1]).astype(np.int64))
        back = np.zeros_like(weight)
        back[rows, file.section("columns").view(np.uint32)] = file.section("values").view(np.float32)
        assert file.bias is None
    np.testing.assert_array_equal(back, weight)


def test_pruning_dtype_and_density(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((64, 128)).astype(np.float32)
    weight[:16] = 0
    weight[:, 100] = 0
    packed = spmmd.pack(weight, tmp_path / "w.spmmpk", prune=0.5, store_dtype="f16")
    assert (packed.dtype, packed.format, packed.sparsity) == (spmmd.DType.F16, "BITMAP", 0.5)
    assert packed.metadata["pruning"] == "magnitude:0.5"
    seen = spmmd.inspect(tmp_path / "w.spmmpk", map_size=(4, 8))
    density = seen.density
    assert density is not None
    assert density.shape == (4, 8)
    assert density[0].max() == 0
    assert density.mean() == pytest.approx(0.5)
    assert (seen.empty_rows, seen.empty_cols) == (16, 1)
    three = spmmd.pack(weight, tmp_path / "w.spmmpk", prune=spmmd.NM(2, 4), format="three_layer", store_dtype="bf16")
    assert three.shares["sparse_tc"] == 1
    assert three.shares["slot_filled"] == three.shares["residual"] == 0
    whole = spmmd.inspect(tmp_path / "w.spmmpk", map_size=(1024, 1024)).density
    assert whole is not None
    assert whole.shape == (64, 128)


def test_weights_from_files(tmp_path: Path) -> None:
    packed = spmmd.pack(f"{BLOCK}:up.weight", tmp_path / "up.spmmpk", prune=0.7, format="rlc_csc", store_dtype="f16")
    assert packed.numbers == {"run_bits": 4}
    assert packed.metadata["source"] == f"{BLOCK}:up.weight"
    raw = spmmd.inspect(f"{BLOCK}:up.weight")
    assert (raw.m, raw.k, raw.format, raw.sections) == (packed.m, packed.k, None, ())
    sparse = REPOSITORY / "tests/data/compressed_tensors/sparse_bitmask.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    spmmd.pack(f"{sparse}:{name}", tmp_path / "ct.spmmpk", format="csr")
    assert spmmd.inspect(tmp_path / "ct.spmmpk").nnz == spmmd.inspect(f"{sparse.parent}/dense.safetensors:{name}").nnz


def test_a_packed_file_is_weights_like_any_other(
    tmp_path: Path, server: LocalServer, client: spmmd.Client, spmmctl: Path
) -> None:
    import subprocess

    weight = sparse_weight(np.random.default_rng(4), 40, 60)
    spmmd.pack(weight, tmp_path / "w.spmmpk", format="three_layer", bias=np.ones(40))
    arguments = [f"--server={server.address}", "register", "packed", f"--file={tmp_path}/w.spmmpk"]
    subprocess.run([spmmctl, *arguments], check=True, capture_output=True)
    assert client.get("packed").has_bias
    x = np.eye(60, dtype=np.float32)
    np.testing.assert_allclose(client.matmul("packed", x), weight.T.astype(np.float32) + 1, rtol=1e-6)


def test_damage_is_refused_by_both_readers(tmp_path: Path) -> None:
    path = tmp_path / "w.spmmpk"
    spmmd.pack(sparse_weight(np.random.default_rng(5), 70, 90), path)
    good = path.read_bytes()
    damaged = {
        "magic": b"x" + good[1:],
        "version": good[:8] + b"\x09" + good[9:],
        "header": good[:60] + bytes([good[60] ^ 1]) + good[61:],
        "cut": good[:-4096],
        "longer": good + bytes(4096),
        "short": good[:100],
        "empty": b"",
        "section": good[:5000] + bytes([good[5000] ^ 1]) + good[5001:],
        "zeros behind a section": good[:-1] + b"\x01",
    }
    for name, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(spmmd.PackedFileError, match=r"w\.spmmpk"):
            spmmd.inspect(path)
        with pytest.raises(spmmd.PackedFileError, match=r"w\.spmmpk"), spmmd.PackedFile(path) as file:  # noqa: PT012
            assert name in ("section", "zeros behind a section"), "only those need verify()"
            file.verify()
    with pytest.raises(FileNotFoundError):
        spmmd.PackedFile(tmp_path / "missing.spmmpk")
    with pytest.raises(spmmd.PackedFileError, match=r"missing\.spmmpk"):
        spmmd.inspect(tmp_path / "missing.spmmpk")


def test_wrong_arguments_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sparse_weight(np.random.default_rng(6), 8, 8)
    output = tmp_path / "w.spmmpk"
    with pytest.raises(spmmd.PackedFileError, match="'zip' is not one of auto, bitmap"):
        spmmd.pack(weight, output, format="zip")
    with pytest.raises(spmmd.PackedFileError, match="THREE_LAYER"):
        spmmd.pack(weight.astype(np.float32), output, format="three_layer")
    with pytest.raises(spmmd.PackedFileError, match="sparsity out of range"):
        spmmd.pack(weight, output, prune=1.5)
    with pytest.raises(spmmd.PackedFileError, match=r"--bias: .* has shape"):
        spmmd.pack(weight, output, bias=np.zeros(7))
    with pytest.raises(TypeError, match="float64 is not served"):
        spmmd.pack(weight.astype(np.float64), output)
    with pytest.raises(ValueError, match=r"expected \[M, K\]"):
        spmmd.pack(weight[0], output)
    weight[2, 3] = np.nan
    with pytest.raises(spmmd.PackedFileError, match="row 2, column 3"):
        spmmd.pack(weight, output)
    assert spmmd.pack(weight, output, allow_nonfinite=True).nnz == np.count_nonzero(weight)
    monkeypatch.delenv("SPMMCTL")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="SPMMCTL"):
        spmmd.inspect(output)
