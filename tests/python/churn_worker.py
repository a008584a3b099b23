"""One of the callers of e2e/test_churn.py; it is killed in the middle of what it does.

Arguments: address, seed, number of shared layers.
"""

from __future__ import annotations

import sys
import uuid

import numpy as np
from helpers import assert_product, sparse_weight

import spmmd
from spmmd import shared

ROWS, COLS = 1024, 1024


def shared_layer(index: int) -> np.ndarray:
    """The weights of layer `shared<index>`."""
    return sparse_weight(np.random.default_rng(index), ROWS, COLS)


class GaveUpError(Exception):
    """Raised in the middle of an upload."""


def through_a_ring(client: spmmd.Client, name: str, x: np.ndarray, weight: np.ndarray) -> None:
    """Runs the layer a few times through a ring; without closing it when the process is killed meanwhile."""
    program = spmmd.Program()
    program.output(program.matmul(name, program.input("x"), name="y"))
    with client.open_ring([client.register_program(program)], entries=8) as ring:
        inputs = ring.array(x.shape, "f32")
        outputs = ring.array((len(x), ROWS), "f32", offset=1 << 16)
        try:
            inputs[:] = x
            for _ in range(20):
                ring.execute(len(x), [spmmd.Slot(0, COLS)], [spmmd.Slot(1 << 16, ROWS)])
            assert_product(outputs.copy(), x, weight)
        finally:
            del inputs, outputs


def main() -> None:
    shared.MIN_SHARED_BYTES = 4096  # so that the tensors here travel through regions
    address, seed, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = np.random.default_rng(seed)
    own = f"own-{uuid.uuid4().hex}"
    x = rng.standard_normal((3, COLS)).astype(np.float32)

    def give_up(progress: spmmd.Progress) -> None:
        if progress.received_bytes > 0:
            raise GaveUpError

    with spmmd.Client(address, timeout=20.0, chunk_bytes=64 << 10) as client:
        while True:
            index = int(rng.integers(layers))
            name = f"shared{index}"
            try:
                match int(rng.integers(10)):
                    case 0:
                        weight = sparse_weight(rng, ROWS, COLS)
                        client.register(own, weight, pin=bool(rng.integers(2)))
                        assert_product(client.matmul(own, x), x, weight)
                        client.unregister(own)
                    case 1:
                        client.register(own, sparse_weight(rng, ROWS, COLS), progress=give_up)
                        client.unregister(own)
                    case 2:
                        client.matmul(name, x, timeout=float(rng.uniform(0.0002, 0.01)))
                    case 3:
                        with client.stream() as stream:
                            futures = [stream.matmul(f"shared{int(rng.integers(layers))}", x) for _ in range(8)]
                            futures[0].result(20)
                        # Leaves the others; closing waits for them.
                    case 4 | 5:
                        through_a_ring(client, name, x, shared_layer(index))
                    case _:
                        assert_product(client.matmul(name, x), x, shared_layer(index))
            except (spmmd.DeadlineExceededError, spmmd.ResourceExhaustedError, spmmd.CancelledError, GaveUpError):
                pass


if __name__ == "__main__":
    main()
