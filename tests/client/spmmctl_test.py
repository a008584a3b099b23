#!/usr/bin/env python3
"""Every command of spmmctl against a real server on a Unix socket, with right and with wrong input.

Needs nothing but the standard library: matrices are small enough to be multiplied here, in double precision.
"""

import argparse
import array
import ast
import json
import math
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

SPMMD = ""
SPMMCTL = ""
DEADLINE_SECONDS = 60


# --- Files ---------------------------------------------------------------------------------------------------------


def fp16(value):
    return struct.unpack("<e", struct.pack("<e", value))[0]


def bf16_bits(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def fp32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def elements(values, dtype):
    if dtype == "bf16":
        return struct.pack(f"<{len(values)}H", *[bf16_bits(v) for v in values])
    return struct.pack(f"<{len(values)}{ {'fp16': 'e', 'fp32': 'f', 'fp64': 'd'}[dtype] }", *values)


def write_npy(path, rows, dtype="fp32"):
    descr = {"fp16": "<f2", "fp32": "<f4", "bf16": "<V2", "fp64": "<f8"}[dtype]
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({len(rows)}, {len(rows[0])}), }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    flat = [v for row in rows for v in row]
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + elements(flat, dtype))
    return str(path)


def read_npy(path):
    raw = pathlib.Path(path).read_bytes()
    length = struct.unpack("<H", raw[8:10])[0]
    header = ast.literal_eval(raw[10 : 10 + length].decode())
    rows, cols = header["shape"]
    data = raw[10 + length :]
    if header["descr"] == "<f2":
        flat = list(struct.unpack(f"<{rows * cols}e", data))
    elif header["descr"] == "<f4":
        flat = list(array.array("f", data))
    else:
        flat = [struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in struct.unpack(f"<{rows * cols}H", data)]
    return header["descr"], [flat[r * cols : (r + 1) * cols] for r in range(rows)]


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        raw = elements(values, "fp32")
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


# --- Reference -----------------------------------------------------------------------------------------------------


def matrix(rows, cols, seed):
    generator = random.Random(seed)
    return [[fp32(generator.gauss(0, 1)) for _ in range(cols)] for _ in range(rows)]


def pruned(w, sparsity):
    order = sorted((abs(v), r, c) for r, row in enumerate(w) for c, v in enumerate(row))
    result = [row[:] for row in w]
    for _, r, c in order[: round(sparsity * len(w) * len(w[0]))]:
        result[r][c] = 0.0
    return result


def product(x, w, bias=None):
    return [
        [math.fsum(a * b for a, b in zip(row, out)) + (bias[m] if bias else 0) for m, out in enumerate(w)] for row in x
    ]


def gelu(v):
    return 0.5 * v * (1 + math.erf(v / math.sqrt(2)))


# --- The server and the command ------------------------------------------------------------------------------------


class Server:
    def __init__(self, directory, *flags, listen=None):
        self.address = listen or f"unix:{directory}/spmmd.sock"
        self.log = open(directory / "spmmd.log", "ab")
        self.process = subprocess.Popen(
            [SPMMD, f"--listen={self.address}", "--metrics-listen=127.0.0.1:0", "--backend=cpu", *flags],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        ready = self.process.stdout.readline()
        if not ready.startswith("spmmd ready grpc="):
            self.stop()
            raise RuntimeError(f"spmmd did not start: {ready!r}\n{(directory / 'spmmd.log').read_text()}")
        self.address = ready.split("grpc=")[1].split()[0].split(",")[0]

    def stop(self):
        """Exit code after SIGTERM, or that of a server that has ended before."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DEADLINE_SECONDS)
        finally:
            self.process.kill()
            self.process.stdout.close()
            self.log.close()


class Result:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self):
        return json.loads(self.out)


def spmmctl(*arguments, server=None, env=None):
    command = [SPMMCTL, *([f"--server={server}"] if server else []), *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPMMD_")} | (env or {})
    return Result(
        subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=environment, check=False)
    )


class Spmmctl(unittest.TestCase):
    M, K, N = 48, 64, 3

    @classmethod
    def setUpClass(cls):
        cls.directory = pathlib.Path(tempfile.mkdtemp(prefix="spmmctl-"))
        cls.addClassCleanup(shutil.rmtree, cls.directory)
        cls.repository = cls.directory / "models"
        cls.repository.mkdir()
        cls.server = Server(cls.directory, f"--model-repository={cls.repository}")
        cls.addClassCleanup(cls.server.stop)
        cls.w = matrix(cls.M, cls.K, 1)
        cls.x = matrix(cls.N, cls.K, 2)
        cls.w_file = write_npy(cls.directory / "w.npy", cls.w)
        cls.x_file = write_npy(cls.directory / "x.npy", cls.x)

    def tearDown(self):
        if self.server.process.poll() is not None:
            self.fail(f"spmmd has died: {(self.directory / 'spmmd.log').read_text()[-2000:]}")
        for layer in {layer["name"] for layer in self.ctl("list", "--json").json["layers"]}:
            self.ctl("unregister", layer)

    def run_raw(self, *arguments):
        return spmmctl(*arguments, server=self.server.address)

    def ctl(self, *arguments):
        """Runs a command that must succeed."""
        result = self.run_raw(*arguments)
        self.assertEqual(result.code, 0, f"{arguments}: {result.out}{result.err}")
        self.assertEqual(result.err, "")
        return result

    def fails(self, code, pattern, *arguments):
        """Runs a command that must fail, and does so without a word on standard output."""
        result = self.run_raw(*arguments)
        self.assertEqual(result.code, code, f"{arguments}: {result.out}{result.err}")
        self.assertEqual(result.out, "")
        self.assertRegex(result.err, pattern)
        return result

    def multiply(self, layer, x_file, *options):
        y_file = self.directory / "y.npy"
        done = self.ctl("run", layer, "--input", x_file, "--output", y_file, "--json", *options).json
        descr, y = read_npy(y_file)
        return done, descr, y

    def assert_close(self, actual, expected, tolerance=1e-4):
        scale = max(abs(v) for row in expected for v in row)
        for row, wanted in zip(actual, expected, strict=True):
            for a, b in zip(row, wanted, strict=True):
                self.assertLessEqual(abs(a - b), tolerance * scale)

    # --- Commands.

    def test_status(self):
        status = self.ctl("status", "--json").json
        self.assertTrue(status["healthy"])
        self.assertEqual(status["server"]["backend"], "cpu")
        self.assertIn("BITMAP", status["server"]["formats"])
        self.assertGreater(status["server"]["limits"]["max_tokens"], 0)
        self.assertEqual(status["devices"][0]["id"], "cpu:0")
        self.assertGreater(status["devices"][0]["memory_budget_bytes"], 0)
        text = self.ctl("status", "--wait", "5").out
        self.assertRegex(text, r"spmmd \d+\.\d+\.\d+.*: serving")
        self.assertIn("cpu:0", text)

    def test_register_describe_run_unregister(self):
        layer = self.ctl("register", "a/b.c", "--file", self.w_file, "--prune", "magnitude:0.5", "--json").json
        self.assertEqual((layer["name"], layer["version"], layer["m"], layer["k"]), ("a/b.c", 1, self.M, self.K))
        self.assertEqual(layer["nnz"], self.M * self.K // 2)
        self.assertEqual(layer["sparsity"], 0.5)
        self.assertEqual(layer["state"], "ready")
        self.assertTrue(layer["uploaded"])
        self.assertEqual(layer["uploaded_bytes"], self.M * self.K * 4)

        described = self.ctl("describe", "a/b.c", "--json").json
        self.assertEqual(described["format"], layer["format"])
        self.assertEqual(sum(section["bytes"] for section in described["sections"]), described["bytes"])
        self.assertTrue(described["format_reason"])
        self.assertIn("a/b.c version 1", self.ctl("describe", "a/b.c").out)
        self.assertRegex(self.ctl("list").out, r"NAME +VERSION.*\na/b\.c +1 +\[48, 64\]")

        done, descr, y = self.multiply("a/b.c", self.x_file)
        self.assertEqual((done["n"], done["k"], done["m"]), (self.N, self.K, self.M))
        self.assertEqual(descr, "<f4")
        self.assert_close(y, product(self.x, pruned(self.w, 0.5)))

        removed = self.ctl("unregister", "a/b.c", "--json").json
        self.assertEqual(removed["removed_versions"], 1)
        self.assertGreater(removed["freed_bytes"], 0)
        self.assertEqual(self.ctl("list", "--json").json, {"layers": []})
        self.assertEqual(self.ctl("list").out, "no layers\n")

    def test_element_types(self):
        for dtype, tolerance in (("fp16", 2e-3), ("bf16", 2e-2), ("fp32", 1e-4)):
            with self.subTest(dtype):
                w_file = write_npy(self.directory / f"w_{dtype}.npy", self.w, dtype)
                x_file = write_npy(self.directory / f"x_{dtype}.npy", self.x, dtype)
                layer = self.ctl("register", dtype, "--file", w_file, "--json").json
                self.assertEqual(layer["dtype"], dtype)
                done, descr, y = self.multiply(dtype, x_file, "--output-dtype", dtype)
                self.assertEqual(done["input_dtype"], dtype)
                self.assertEqual(descr, {"fp16": "<f2", "bf16": "<V2", "fp32": "<f4"}[dtype])
                self.assert_close(y, product(self.x, self.w), tolerance)
        narrowed = self.ctl("register", "narrowed", "--file", self.w_file, "--store-dtype", "fp16", "--json").json
        self.assertEqual(narrowed["dtype"], "fp16")
        rounded = [[fp16(v) for v in row] for row in self.w]
        self.assert_close(self.multiply("narrowed", self.x_file)[2], product(self.x, rounded))

    def test_content_known_to_the_server_is_not_sent(self):
        self.assertTrue(self.ctl("register", "one", "--file", self.w_file, "--json").json["uploaded"])
        again = self.ctl("register", "two", "--file", self.w_file, "--json").json
        self.assertFalse(again["uploaded"])
        self.assertEqual(again["uploaded_bytes"], 0)
        self.assertIn("sent nothing", self.ctl("register", "three", "--file", self.w_file).out)
        self.assert_close(self.multiply("two", self.x_file)[2], product(self.x, self.w))

    def test_versions(self):
        other = matrix(self.M, self.K, 3)
        self.ctl("register", "v", "--file", self.w_file)
        second = self.ctl("register", "v", "--file", write_npy(self.directory / "w2.npy", other), "--json").json
        self.assertEqual(second["version"], 2)
        self.assert_close(self.multiply("v@1", self.x_file)[2], product(self.x, self.w))
        self.assert_close(self.multiply("v", self.x_file)[2], product(self.x, other))
        self.assertEqual(self.ctl("unregister", "v@1", "--json").json["removed_versions"], 1)
        self.fails(1, "NOT_FOUND", "describe", "v@1")
        self.assertEqual(self.ctl("describe", "v", "--json").json["version"], 2)

    def test_safetensors_bias_and_activation(self):
        bias = [fp32(0.1 * m - 2) for m in range(self.M)]
        flat = [v for row in self.w for v in row]
        path = write_safetensors(
            self.directory / "block.safetensors",
            {"up.bias": ([self.M], bias), "up.weight": ([self.M, self.K], flat), "other": ([2, 2], [1, 2, 3, 4])},
        )
        self.ctl("register", "up", "--file", f"{path}:up.weight", "--bias", "up.bias")
        self.assertTrue(self.ctl("describe", "up", "--json").json["has_bias"])
        expected = product(self.x, self.w, bias)
        self.assert_close(self.multiply("up", self.x_file)[2], expected)
        relu = [[max(v, 0) for v in row] for row in expected]
        self.assert_close(self.multiply("up", self.x_file, "--activation", "relu")[2], relu)
        self.assert_close(
            self.multiply("up", self.x_file, "--activation", "gelu")[2], [[gelu(v) for v in row] for row in expected]
        )
        self.assert_close(self.multiply("up", self.x_file, "--ignore-bias")[2], product(self.x, self.w))
        self.fails(1, "several matrices.*up.weight", "register", "x", "--file", path)
        self.fails(
            1, "no tensor 'down.weight'; it has other, up.weight", "register", "x", "--file", f"{path}:down.weight"
        )
        self.fails(1, "--bias.*48 elements", "register", "x", "--file", f"{path}:up.weight", "--bias", self.w_file)

    def test_sparse_activations(self):
        self.ctl("register", "s", "--file", self.w_file, "--prune", "magnitude:0.5")
        masked = [[0.0 if abs(v) <= 0.8 else v for v in row] for row in self.x]
        expected = product(masked, pruned(self.w, 0.5))
        self.assert_close(self.multiply("s", self.x_file, "--sparse-threshold", "0.8")[2], expected)
        one_token = write_npy(self.directory / "x1.npy", self.x[:1])
        self.assert_close(self.multiply("s", one_token, "--sparse-threshold", "0.8")[2], expected[:1])
        self.ctl("register", "t", "--file", self.w_file, "--prune", "magnitude:0.5", "--activation-threshold", "0.8")
        self.assert_close(self.multiply("t", self.x_file)[2], expected)
        self.fails(
            2, "--sparse-threshold", "run", "s", "--input", self.x_file, "--output", "y", "--sparse-threshold=-1"
        )

    def test_pack_inspect_and_register_what_was_packed(self):
        packed = str(self.directory / "w.spmmpk")
        half = write_npy(self.directory / "half.npy", self.w, "fp16")
        bias = [fp32(0.1 * m) for m in range(self.M)]
        bias_file = write_npy(self.directory / "bias.npy", [bias])
        options = ("--format", "three_layer", "--prune", "magnitude:0.5", "--bias", bias_file)
        report = spmmctl("pack", half, "-o", packed, "--json", *options).json
        self.assertEqual((report["format"], report["m"], report["k"]), ("THREE_LAYER", self.M, self.K))
        self.assertEqual(report["nnz"], self.M * self.K // 2)
        self.assertGreater(report["seconds"], 0)
        self.assertNotIn("density", report)

        seen = spmmctl("inspect", packed, "--json").json
        self.assertEqual(
            {k: v for k, v in report.items() if k != "seconds"}, {k: v for k, v in seen.items() if k != "density"}
        )
        self.assertEqual(sum(section["bytes"] for section in seen["sections"]), seen["bytes"])
        self.assertEqual(seen["values_bytes"] + seen["metadata_bytes"] + seen["padding_bytes"], seen["bytes"])
        self.assertEqual(seen["file_bytes"], os.path.getsize(packed))
        shares = seen["shares"]
        self.assertAlmostEqual(shares["sparse_tc"] + shares["slot_filled"] + shares["residual"], 1)
        self.assertEqual(seen["metadata"], {"pruning": "magnitude:0.5", "source": half})
        cells = seen["density"]["cells"]
        self.assertEqual((len(cells), len(cells[0])), (seen["density"]["rows"], seen["density"]["cols"]))
        self.assertAlmostEqual(sum(map(sum, cells)) / (len(cells) * len(cells[0])), 0.5)

        text = spmmctl("inspect", packed, "--map=ascii", "--map-size", "4x8")
        self.assertEqual((text.code, text.err), (0, ""))
        for part in ("THREE_LAYER, layout version", "50.0 % zeros", "residual_positions", "slot_filled", "of dense"):
            self.assertIn(part, text.out)
        self.assertRegex(text.out, r"\n\+-{8}\+\n(\|[ .:=+*#%@-]{8}\|\n){4}\+-{8}\+\n")
        self.assertIn("\033[48;5;", spmmctl("inspect", packed, "--map=color").out)
        self.assertNotIn("\033", spmmctl("inspect", packed).out, "not on a pipe")
        self.assertNotIn("density", spmmctl("inspect", packed, "--map=off").out)

        self.ctl("register", "packed", "--file", packed)
        expected = product(self.x, pruned([[fp16(v) for v in row] for row in self.w], 0.5), bias)
        self.assert_close(self.multiply("packed", self.x_file)[2], expected, 2e-3)

    def test_pack_every_format_and_read_each_back(self):
        half = write_npy(self.directory / "half.npy", pruned(self.w, 0.5), "fp16")
        for name in (
            "auto",
            "bitmap",
            "bitmap_gpu",
            "row_stream",
            "column_piece",
            "three_layer",
            "rlc_csc",
            "dense",
            "csr",
            "coo",
        ):
            with self.subTest(name):
                packed = str(self.directory / f"{name}.spmmpk")
                line = spmmctl("pack", half, "-o", packed, "--format", name)
                self.assertEqual((line.code, line.err), (0, ""))
                self.assertRegex(line.out, rf"^packed .*50\.0 % zeros.* -> {packed}\n$")
                back = str(self.directory / "back.spmmpk")
                # Through another format, so that the reader of weights unpacks this one.
                self.assertEqual(spmmctl("pack", packed, "-o", back, "--format", "dense").code, 0)
                seen = spmmctl("inspect", back, "--json", "--map-size=48x64").json["density"]
                whole = [[float(v != 0) for v in row] for row in pruned(self.w, 0.5)]
                self.assertEqual(seen["cells"], whole)

    def test_pack_all_of_a_checkpoint(self):
        flat = [v for row in self.w for v in row]
        path = write_safetensors(
            self.directory / "model.safetensors",
            {"a.bias": ([2], [1, 2]), "a.weight": ([self.M, self.K], flat), "../b": ([2, 2], [1, 0, 0, 4])},
        )
        out = self.directory / "packed" / "model"
        report = spmmctl("pack", path, "--all", "-o", out, "--prune=magnitude:0.5", "--json").json
        self.assertEqual(sorted(os.listdir(out)), ["_._b.spmmpk", "a.weight.spmmpk"])
        self.assertEqual(
            {layer["metadata"]["source"] for layer in report["layers"]}, {f"{path}:../b", f"{path}:a.weight"}
        )
        self.assertEqual(spmmctl("pack", path, "--all", "-o", out).out.count("\n"), 2)
        matched = spmmctl("pack", path, "--all", "--match", "*.weight", "-o", out, "--json").json["layers"]
        self.assertEqual([layer["metadata"]["source"] for layer in matched], [f"{path}:a.weight"])
        self.assertRegex(
            spmmctl("pack", path, "--all", "--match", "q*", "-o", out).err, "has no matrix that --match names"
        )
        data = pathlib.Path(__file__).resolve().parents[1] / "data" / "compressed_tensors"
        index = data / "sharded" / "model.safetensors.index.json"
        layers = spmmctl("pack", index, "--all", "-o", out / "ct", "--json").json["layers"]
        dense = data / "dense.safetensors"
        for layer in layers:
            tensor = layer["metadata"]["source"].split(".json:")[1]
            self.assertEqual(layer["nnz"], spmmctl("inspect", f"{dense}:{tensor}", "--json").json["nnz"], tensor)
        self.assertGreaterEqual(len(layers), 3)

    def test_pack_and_inspect_refuse_what_is_wrong(self):
        packed = str(self.directory / "p.spmmpk")
        nan = write_npy(self.directory / "nan.npy", [[1.0, math.nan]])

        def fails(code, pattern, *arguments):
            result = spmmctl(*arguments)
            self.assertEqual(result.code, code, f"{arguments}: {result.out}{result.err}")
            self.assertEqual(result.out, "")
            self.assertRegex(result.err, pattern)

        fails(2, "FILE is required", "pack")
        fails(2, "--output is required", "pack", self.w_file)
        fails(2, "'zip' is not one of auto, bitmap, ", "pack", self.w_file, "-o", packed, "--format=zip")
        fails(2, "expected magnitude:SPARSITY", "pack", self.w_file, "-o", packed, "--prune=half")
        fails(2, r"expected FILE.npy", "pack", "w.bin", "-o", packed)
        fails(1, "THREE_LAYER.*fp16|dtype", "pack", self.w_file, "-o", packed, "--format=three_layer")
        fails(1, "NOT_FOUND.*missing.npy", "pack", "missing.npy", "-o", packed)
        fails(1, "nan.npy.*row 0, column 1", "pack", nan, "-o", packed)
        fails(1, "no/such", "pack", self.w_file, "-o", "no/such/p.spmmpk")
        fails(1, "--all: takes", "pack", self.w_file, "--all", "-o", packed)
        self.assertFalse(os.path.exists(packed))
        self.assertEqual(spmmctl("pack", self.w_file, "-o", packed).code, 0)
        raw = pathlib.Path(packed).read_bytes()
        for damage in (raw[:-1], raw[:5000] + bytes([raw[5000] ^ 4]) + raw[5001:], b"nonsense", b""):
            pathlib.Path(packed).write_bytes(damage)
            fails(1, "p.spmmpk: ", "inspect", packed)
        fails(1, "NOT_FOUND", "inspect", "missing.spmmpk")
        fails(1, "wrong magic", "inspect", __file__)
        fails(2, "'0x4' is not ROWSxCOLS", "inspect", packed, "--map-size=0x4")
        fails(2, "not one of auto, color", "inspect", packed, "--map=png")
        error = json.loads(spmmctl("--json", "inspect", "missing.spmmpk").err)["error"]
        self.assertEqual((error["code"], error["hint"]), ("NOT_FOUND", ""))

    def test_numbers_that_are_none(self):
        for value in ("nan", "inf", "-inf", "-1", "0", "1e10", "x"):
            self.fails(2, f"--timeout: '{value}' is not a number of seconds above 0", f"--timeout={value}", "list")
            if value != "0":
                self.fails(2, f"--wait: '{value}' is not a number of seconds from 0", "status", f"--wait={value}")
        for value in ("nan", "inf", "-0.5", "x"):
            for command in (
                ("run", "s", "--input", self.x_file, "--output", "y", f"--sparse-threshold={value}"),
                ("register", "s", "--file", self.w_file, f"--activation-threshold={value}"),
            ):
                self.fails(2, f"threshold: '{value}' is not a finite number from 0", *command)

    def test_n_of_m_pruning(self):
        layer = self.ctl("register", "nm", "--file", self.w_file, "--prune", "nm:2:4", "--json").json
        self.assertEqual(layer["nnz"], self.M * self.K // 2)
        expected = [row[:] for row in self.w]
        for row in expected:
            for start in range(0, self.K, 4):
                for c in sorted(range(start, start + 4), key=lambda c: abs(row[c]))[:2]:
                    row[c] = 0.0
        self.assert_close(self.multiply("nm", self.x_file)[2], product(self.x, expected))

    def test_formats(self):
        for name in ("dense", "bitmap"):
            layer = self.ctl("register", name, "--file", self.w_file, "--format", name, "--json").json
            self.assertEqual(layer["format"], name.upper())
            self.assert_close(self.multiply(name, self.x_file)[2], product(self.x, self.w))

    def test_bench(self):
        self.ctl("register", "b", "--file", self.w_file, "--prune", "magnitude:0.5")
        bench = self.ctl("bench", "b", "--tokens", "1,8", "--repetitions", "3", "--json").json
        self.assertEqual([speed["tokens"] for speed in bench["speeds"]], [1, 8])
        for speed in bench["speeds"]:
            self.assertGreater(speed["seconds_p50"], 0)
            self.assertLessEqual(speed["seconds_p10"], speed["seconds_p90"])
            self.assertGreater(speed["dense_seconds_p50"], 0)
            self.assertTrue(speed["kernel"])
        self.assertEqual(len(self.ctl("describe", "b", "--json").json["speeds"]), 2)
        self.assertRegex(self.ctl("bench", "b", "--tokens", "1", "--skip-dense").out, r"TOKENS +FORMAT +KERNEL +P50")

    def test_pin_and_warm(self):
        self.ctl("register", "p", "--file", self.w_file, "--pin")
        self.assertTrue(self.ctl("describe", "p", "--json").json["pinned"])
        self.assertFalse(self.ctl("unpin", "p", "--json").json["pinned"])
        self.assertTrue(self.ctl("pin", "p", "--json").json["pinned"])
        self.assertIn("pinned", self.ctl("describe", "p").out)
        self.assertEqual(self.ctl("warm", "p", "--json").json["state"], "ready")

    def test_remote_files(self):
        shutil.copy(self.w_file, self.repository / "w.npy")
        layer = self.ctl("register", "r", "--remote", "--file", "w.npy", "--prune", "magnitude:0.5", "--json").json
        self.assertFalse(layer["uploaded"])
        self.assert_close(self.multiply("r", self.x_file)[2], product(self.x, pruned(self.w, 0.5)))
        self.fails(1, "NOT_FOUND", "register", "x", "--remote", "--file", "missing.npy")
        self.fails(1, "INVALID_ARGUMENT.*path", "register", "x", "--remote", "--file", "../w.npy")
        self.fails(1, "INVALID_ARGUMENT.*path", "register", "x", "--remote", "--file", self.w_file)

    def test_list_prefix(self):
        for name in ("blk.0.up", "blk.0.down", "head"):
            self.ctl("register", name, "--file", self.w_file)
        names = [layer["name"] for layer in self.ctl("list", "--prefix", "blk.", "--json").json["layers"]]
        self.assertEqual(names, ["blk.0.down", "blk.0.up"])

    def test_large_upload_and_output(self):
        """Well past gRPC's own 4 MiB limit, in many chunks."""
        rows, cols = 1024, 2048
        values = array.array("f", bytes(4 * rows * cols))
        for r in range(rows):
            values[r * cols + (7 * r) % cols] = r + 1.0
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}"
        header += " " * (-(len(header) + 11) % 64) + "\n"
        big = self.directory / "big.npy"
        big.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + values.tobytes())
        layer = self.ctl("register", "big", "--file", big, "--json").json
        self.assertEqual(layer["uploaded_bytes"], 4 * rows * cols)
        self.assertEqual(layer["nnz"], rows)
        ones = write_npy(self.directory / "ones.npy", [[1.0] * cols] * 2)
        _, _, y = self.multiply("big", ones)
        self.assertEqual(y, [[r + 1.0 for r in range(rows)]] * 2)

    # --- Wrong input.

    def test_wrong_arguments(self):
        self.fails(2, "unknown command", "frobnicate")
        self.fails(2, "expected magnitude:SPARSITY", "register", "x", "--file", self.w_file, "--prune", "magnitude:1.5")
        self.fails(2, "expected magnitude:SPARSITY", "register", "x", "--file", self.w_file, "--prune", "half")
        self.fails(2, "not one of", "register", "x", "--file", self.w_file, "--format", "csr")
        self.fails(2, "expected FILE.npy", "register", "x", "--file", "w.bin")
        self.fails(2, "--file", "register", "x")
        self.fails(2, "NAME", "describe")
        self.fails(2, "--tokens", "bench", "x", "--tokens", "1,0")
        self.fails(2, "NAME@VERSION", "describe", "x@y")
        self.assertEqual(spmmctl("list", server="nowhere").code, 2)
        self.assertEqual(spmmctl().code, 2)
        for help_option in (["--help"], ["run", "--help"], ["--version"]):
            self.assertEqual(spmmctl(*help_option).code, 0)

    def test_wrong_files(self):
        d = self.directory
        (d / "text.npy").write_text("not an array")
        nan = [row[:] for row in self.w]
        nan[3][5] = float("nan")
        self.fails(1, "NOT_FOUND.*missing.npy", "register", "x", "--file", d / "missing.npy")
        self.fails(1, "text.npy", "register", "x", "--file", d / "text.npy")
        self.fails(1, "<f8", "register", "x", "--file", write_npy(d / "w64.npy", self.w, "fp64"))
        self.fails(1, r"INVALID_ARGUMENT", "register", "x", "--file", write_npy(d / "nan.npy", nan))
        self.ctl("register", "nan", "--file", d / "nan.npy", "--allow-nonfinite")
        large = write_npy(d / "large.npy", [[1e6, 1.0]])
        self.fails(1, "store_dtype|infinit", "register", "x", "--file", large, "--store-dtype", "fp16")
        self.ctl("register", "ok", "--file", self.w_file)
        self.fails(1, "missing.npy", "run", "ok", "--input", d / "missing.npy", "--output", d / "y.npy")
        self.fails(1, "nodir", "run", "ok", "--input", self.x_file, "--output", d / "nodir" / "y.npy")

    def test_wrong_requests(self):
        self.ctl("register", "ok", "--file", self.w_file)
        narrow = write_npy(self.directory / "narrow.npy", [[1.0] * 10])
        refused = self.fails(
            1, "INVALID_ARGUMENT", "run", "ok", "--input", narrow, "--output", self.directory / "y.npy"
        )
        self.assertRegex(refused.err, r"inputs\[0\].*10.*64.*\n.*spmmctl describe")
        for command in (["describe"], ["unregister"], ["pin"], ["unpin"], ["warm"], ["bench"]):
            self.fails(1, "NOT_FOUND.*\n.*spmmctl list", *command, "unknown")
        self.fails(1, "name", "register", "bad name", "--file", self.w_file)
        error = json.loads(self.fails(1, "NOT_FOUND", "describe", "unknown", "--json").err)["error"]
        self.assertEqual(error["code"], "NOT_FOUND")
        self.assertEqual(error["reason"], "LAYER_NOT_FOUND")
        self.assertIn("unknown", error["message"])
        field = json.loads(
            self.fails(
                1, "INVALID_ARGUMENT", "run", "ok", "--input", narrow, "--output", self.directory / "y.npy", "--json"
            ).err
        )["error"]["fields"]
        self.assertEqual(len(field), 1)
        self.assertTrue(field[0]["field"])

    def test_no_server(self):
        address = f"unix:{self.directory}/nobody.sock"
        for command in (
            ["list"],
            ["status"],
            ["status", "--wait", "0.2"],
            ["describe", "x"],
            ["register", "x", "--file", self.w_file],
        ):
            result = spmmctl(*command, server=address)
            self.assertEqual(result.code, 1, command)
            self.assertEqual(result.out, "")
            self.assertIn(f"is spmmd running at {address}?", result.err)

    def test_server_from_the_environment(self):
        self.assertEqual(spmmctl("list", env={"SPMMD_SERVER": self.server.address}).code, 0)
        self.assertEqual(spmmctl("list", "--server", self.server.address, env={"SPMMD_SERVER": "x:1"}).code, 0)


class Secured(unittest.TestCase):
    def test_tls_and_token(self):
        directory = pathlib.Path(tempfile.mkdtemp(prefix="spmmctl-tls-"))
        self.addCleanup(shutil.rmtree, directory)
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            + ["-keyout", directory / "key.pem", "-out", directory / "cert.pem", "-days", "2", "-subj", "/CN=localhost"]
            + ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
            check=True,
            capture_output=True,
        )
        (directory / "tokens").write_text(
            "admin right-token-of-sufficient-length\ndata data-token-of-sufficient-length\n"
        )
        for token in ("right", "data", "wrong"):
            (directory / token).write_text(f"{token}-token-of-sufficient-length\n")
        server = Server(
            directory,
            f"--tls-cert={directory}/cert.pem",
            f"--tls-key={directory}/key.pem",
            f"--auth-token-file={directory}/tokens",
            listen="127.0.0.1:0",
        )
        self.addCleanup(server.stop)

        def ctl(*options):
            return spmmctl("list", *options, server=server.address)

        ca = ["--tls-ca", directory / "cert.pem"]
        good = ctl(*ca, "--token-file", directory / "right")
        self.assertEqual((good.code, good.out), (0, "no layers\n"), good.err)
        for options, pattern in (
            ([*ca], "UNAUTHENTICATED.*\n.*--token-file"),
            ([*ca, "--token-file", directory / "wrong"], "UNAUTHENTICATED"),
            ([*ca, "--token-file", directory / "data"], "PERMISSION_DENIED.*admin"),
            (["--tls", "--token-file", directory / "right"], "UNAVAILABLE"),
            ([*ca, "--tls-server-name", "other.example"], "UNAVAILABLE"),
            ([], "UNAVAILABLE"),
        ):
            result = ctl(*options)
            self.assertEqual(result.code, 1, (options, result.err))
            self.assertRegex(result.err, pattern)
        self.assertEqual(ctl(*ca, "--token-file", directory / "missing").code, 2)


class Lifetime(unittest.TestCase):
    def test_sigterm_ends_the_server_well(self):
        directory = pathlib.Path(tempfile.mkdtemp(prefix="spmmctl-term-"))
        self.addCleanup(shutil.rmtree, directory)
        server = Server(directory)
        self.addCleanup(server.stop)
        status = spmmctl("status", server=server.address)
        self.assertEqual(status.code, 0, status.err)
        self.assertEqual(server.stop(), 0)
        self.assertEqual(spmmctl("status", server=server.address).code, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--spmmd", required=True)
    parser.add_argument("--spmmctl", required=True)
    options, rest = parser.parse_known_args()
    SPMMD, SPMMCTL = options.spmmd, options.spmmctl
    unittest.main(argv=[sys.argv[0], *rest])
