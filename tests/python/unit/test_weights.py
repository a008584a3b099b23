"""Encodings, hash and chunks of uploads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

import spmmd
from spmmd._proto import layer_catalog_pb2 as catalog_pb2
from spmmd.weights import Options, content_of, upload_spec


def kinds(content: Any) -> list[int]:
    return [kind for kind, _ in content.parts]


def test_dense_parts_and_hash_cover_the_bias() -> None:
    weight = np.arange(6, dtype=np.float16).reshape(2, 3)
    bias = np.array([1.0, 2.0])
    content = content_of(weight, bias)
    assert kinds(content) == [catalog_pb2.CONTENT_PART_VALUES, catalog_pb2.CONTENT_PART_BIAS]
    wire = weight.tobytes() + bias.astype(np.float32).tobytes()
    assert content.xxh3() == xxhash.xxh3_128_hexdigest(wire)
    assert content.xxh3() != content_of(weight).xxh3()
    assert content.nbytes == len(wire)


def test_hash_is_the_canonical_form_of_xxh3_128() -> None:
    # Fixed by the reference implementation: XXH3_128bits("", seed 0), big-endian.
    assert content_of(np.zeros((0, 3), np.float32)).xxh3() == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("chunk_bytes", [1, 5, 12, 100])
def test_chunks_rebuild_the_parts_in_order(chunk_bytes: int) -> None:
    weight = np.arange(6, dtype=np.float16).reshape(2, 3)
    content = content_of(weight, np.ones(2))
    rebuilt: dict[int, bytes] = {}
    for chunk in content.chunks(chunk_bytes):
        assert 0 < len(chunk.data) <= chunk_bytes
        assert chunk.offset == len(rebuilt.get(chunk.part, b""))
        rebuilt[chunk.part] = rebuilt.get(chunk.part, b"") + chunk.data
    assert list(rebuilt.items()) == [(kind, bytes(part)) for kind, part in content.parts]


def test_chunk_bytes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk_bytes"):
        next(content_of(np.ones((1, 1), np.float32)).chunks(0))


def test_csr_from_a_scipy_like_matrix() -> None:
    matrix = SimpleNamespace(
        shape=(2, 3),
        indptr=np.array([0, 1, 2], np.int32),
        indices=np.array([2, 0], np.int32),
        data=np.array([1, 2], np.float32),
    )
    content = content_of(matrix)
    assert content.encoding == catalog_pb2.SOURCE_ENCODING_CSR
    assert content.nnz == 2
    assert [bytes(part) for _, part in content.parts] == [
        np.array([0, 1, 2], np.uint64).tobytes(),
        np.array([2, 0], np.uint32).tobytes(),
        np.array([1, 2], np.float32).tobytes(),
    ]


def test_unsorted_csr_is_put_in_order_on_a_copy() -> None:
    class Matrix:
        format = "csr"
        has_canonical_format = False

        def __init__(self) -> None:
            self.shape, self.data = (1, 3), np.array([1, 2], np.float32)
            self.indptr, self.indices = np.array([0, 2]), np.array([2, 0])

        def copy(self) -> Matrix:
            return Matrix()

        def sum_duplicates(self) -> None:
            order = self.indices.argsort()
            self.indices, self.data = self.indices[order], self.data[order]
            self.has_canonical_format = True

    matrix = Matrix()
    content = content_of(matrix)
    assert bytes(content.parts[1][1]) == np.array([0, 2], np.uint32).tobytes()
    assert matrix.indices.tolist() == [2, 0]


def test_csc_is_refused() -> None:
    matrix = SimpleNamespace(format="csc", shape=(1, 1), indptr=[0, 1], indices=[0], data=np.ones(1, np.float32))
    with pytest.raises(TypeError, match="csc"):
        content_of(matrix)


def test_coo_from_a_scipy_like_matrix() -> None:
    matrix = SimpleNamespace(
        shape=(2, 3), row=np.array([1, 0]), col=np.array([0, 2]), data=np.array([5, 6], ml_dtypes.bfloat16)
    )
    content = content_of(matrix)
    assert content.encoding == catalog_pb2.SOURCE_ENCODING_COO
    assert content.dtype == spmmd.DType.BF16
    assert kinds(content)[:2] == [catalog_pb2.CONTENT_PART_ROW_INDICES, catalog_pb2.CONTENT_PART_COLUMN_INDICES]


def test_bitmap_bits_are_least_significant_first() -> None:
    weight = np.zeros((2, 5), np.float16)
    weight[0, 1], weight[1, 4] = 3, -4
    content = content_of(spmmd.Bitmap.from_dense(weight))
    assert content.encoding == catalog_pb2.SOURCE_ENCODING_BITMAP_UPLOAD
    assert bytes(content.parts[0][1]) == bytes([0b00000010, 0b00000010])
    assert bytes(content.parts[1][1]) == np.array([3, -4], np.float16).tobytes()
    assert content.nnz == 2


def test_fortran_order_slices_and_big_endian_arrive_row_major_and_little_endian() -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = weight[:, ::2].tobytes()
    assert bytes(content_of(np.asfortranarray(weight)[:, ::2]).parts[0][1]) == expected
    assert bytes(content_of(weight[:, ::2].astype(">f4")).parts[0][1]) == expected


@pytest.mark.parametrize("weight", [np.ones((2, 2)), np.ones((2, 2), np.int32), np.ones((2, 2), np.complex64)])
def test_weights_of_other_types_are_refused_rather_than_narrowed(weight: Any) -> None:
    with pytest.raises(TypeError, match="not served"):
        content_of(weight)


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2)])
def test_weights_must_be_a_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[M, K\]"):
        content_of(np.ones(shape, np.float32))


def test_negative_indices_do_not_wrap() -> None:
    with pytest.raises(ValueError, match="column_indices"):
        content_of(spmmd.CSR((1, 1), np.array([0, 1]), np.array([-1]), np.ones(1, np.float32)))


def test_torch_like_bfloat16_keeps_its_bits() -> None:
    bits = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)

    class Tensor:
        dtype = "torch.bfloat16"

        def detach(self) -> Tensor:
            return self

        cpu = contiguous = detach

        def view(self, dtype: str) -> Tensor:
            assert dtype == "int16"
            return self

        def numpy(self) -> Any:
            return bits.view(np.int16)

    import sys

    Tensor.__module__ = "torch.fake"
    sys.modules["torch"] = SimpleNamespace(int16="int16")  # type: ignore[assignment]
    try:
        content = content_of(Tensor())
    finally:
        del sys.modules["torch"]
    assert content.dtype == spmmd.DType.BF16
    assert bytes(content.parts[0][1]) == bits.tobytes()


def test_dlpack_only_objects_are_taken() -> None:
    class Capsule:
        def __init__(self, array: Any) -> None:
            self._array = array

        def __dlpack__(self, **arguments: Any) -> Any:
            return self._array.__dlpack__(**arguments)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    assert content_of(Capsule(np.ones((2, 3), np.float32))).shape == (2, 3)


def test_spec_carries_every_option() -> None:
    content = content_of(np.ones((2, 4), np.float32), np.zeros(2))
    spec = upload_spec("a/b", content, Options(0.5, "bitmap", "bf16", "sharded", 0.25, True, True))
    assert (spec.name, spec.m, spec.k, spec.has_bias) == ("a/b", 2, 4, True)
    assert spec.magnitude.sparsity == 0.5
    assert (spec.format, spec.store_dtype, spec.placement) == (4, 2, 3)
    assert (spec.activation_threshold, spec.pin, spec.allow_nonfinite) == (0.25, True, True)
    bare = upload_spec("a", content, Options(prune=spmmd.NM(2, 4)))
    assert (bare.nm.n, bare.nm.m, bare.HasField("activation_threshold")) == (2, 4, False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (Options(format="zip"), "format: 'zip' is not one of auto, dense"),
        (Options(placement="moon"), "placement"),
        (Options(store_dtype="float64"), "store_dtype: float64 is not served"),
        (Options(store_dtype="nonsense"), "store_dtype"),
    ],
)
def test_bad_options_are_named(options: Options, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        upload_spec("a", content_of(np.ones((1, 1), np.float32)), options)


def test_prune_of_a_wrong_type_says_what_is_right() -> None:
    content = content_of(np.ones((2, 2), np.float32))
    with pytest.raises(TypeError, match=r"prune: .*0\.5.*'magnitude:0\.5'"):
        upload_spec("a", content, Options(prune="magnitude:0.5"))  # type: ignore[arg-type]
    assert upload_spec("a", content, Options(prune=np.float32(0.5))).magnitude.sparsity == 0.5  # type: ignore[arg-type]
