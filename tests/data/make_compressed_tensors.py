#!/usr/bin/env python3
"""Writes tests/data/compressed_tensors/: small checkpoints as the compressed-tensors library itself writes them.

Run once, by hand; the files are checked in. It needs compressed-tensors 0.13.0 (0.20 no longer has the sparse
compressors), torch (2.15.0 was used), safetensors 0.8.0, numpy 2.4.6 and ml_dtypes 0.6.0.

  dense.safetensors              the weights as they are ("dense-saved")
  sparse_bitmask.safetensors     the same weights through BitmaskCompressor
  sparse_24_bitmask.safetensors  the 2:4 weights through Sparse24BitMaskCompressor
  sharded/                       sparse_bitmask again over two shards with an index file
  *.npy                          arrays as numpy.save and ml_dtypes write them, each of the same 3x5 matrix
"""

import json
import pathlib

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import BitmaskCompressor, Sparse24BitMaskCompressor
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).resolve().parent / "compressed_tensors"


def unstructured(rows: int, cols: int, dtype: torch.dtype, sparsity: float) -> torch.Tensor:
    weight = torch.randn(rows, cols, dtype=torch.float32)
    cut = weight.abs().flatten().kthvalue(max(1, int(sparsity * weight.numel()))).values
    return torch.where(weight.abs() > cut, weight, 0.0).to(dtype)


def two_four(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(rows, cols, dtype=torch.float32)
    keep = weight.abs().view(-1, 4).topk(2, dim=1).indices
    mask = torch.zeros(rows * cols // 4, 4, dtype=torch.bool).scatter_(1, keep, True).view(rows, cols)
    weight = torch.where(mask, weight, 0.0)
    weight[1, :] = 0.0  # a row with less than two nonzeros a group: stored values may be zero
    weight[2, 3] = 0.0
    return weight.to(dtype)


def main() -> None:
    torch.manual_seed(20)
    (OUT / "sharded").mkdir(parents=True, exist_ok=True)
    sparse = {
        "model.layers.0.self_attn.q_proj.weight": unstructured(24, 40, torch.bfloat16, 0.5),
        "model.layers.0.mlp.up_proj.weight": unstructured(17, 37, torch.float16, 0.7),
        "model.layers.0.mlp.down_proj.weight": unstructured(5, 9, torch.float32, 0.3),
    }
    structured = {
        "model.layers.1.self_attn.q_proj.weight": two_four(16, 32, torch.bfloat16),
        "model.layers.1.mlp.up_proj.weight": two_four(9, 44, torch.float16),
    }
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.randn(24).to(torch.bfloat16)}
    save_file({**sparse, **structured, **bias}, OUT / "dense.safetensors", metadata={"format": "pt"})

    bitmask = BitmaskCompressor(config=BitmaskConfig()).compress({**sparse, **bias})
    save_file(
        {k: v.contiguous() for k, v in bitmask.items()}, OUT / "sparse_bitmask.safetensors", metadata={"format": "pt"}
    )
    bitmask24 = Sparse24BitMaskCompressor(config=Sparse24BitMaskConfig(sparsity_structure="2:4")).compress(structured)
    save_file(
        {k: v.contiguous() for k, v in bitmask24.items()},
        OUT / "sparse_24_bitmask.safetensors",
        metadata={"format": "pt"},
    )

    names = sorted(bitmask)
    shards = [names[: len(names) // 2], names[len(names) // 2 :]]  # cuts through one layer's parts
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({n: bitmask[n].contiguous() for n in shard}, OUT / "sharded" / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (OUT / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    array = np.arange(15, dtype=np.float32).reshape(3, 5) - 7.5
    np.save(OUT / "f32.npy", array)
    np.save(OUT / "f32_fortran.npy", np.asfortranarray(array))
    np.save(OUT / "f16.npy", array.astype(np.float16))
    np.save(OUT / "bf16.npy", array.astype(ml_dtypes.bfloat16))
    np.save(OUT / "big_endian.npy", array.astype(">f4"))
    np.save(OUT / "f64.npy", array.astype(np.float64))
    with open(OUT / "f16_version2.npy", "wb") as file:
        np.lib.format.write_array(file, array.astype(np.float16), version=(2, 0))
    with open(OUT / "f16_version3.npy", "wb") as file:
        np.lib.format.write_array(file, array.astype(np.float16), version=(3, 0))


if __name__ == "__main__":
    main()
