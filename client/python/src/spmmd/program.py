"""Programs: several matmuls and element-wise steps executed in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmmd._proto import sparse_matmul_pb2 as matmul_pb2
from spmmd.arrays import Array, SparseRows, as_array, as_rows, is_csr, tensor_from_proto, tensor_to_proto
from spmmd.types import Activation, ActivationLike, DType, DTypeLike, Timing, layer_ref, parse_dtype, parse_enum


@dataclass(frozen=True)
class Value:
    """An input or a step of a program; made by Program's methods."""

    name: str


class Program:
    """Builds a program. Steps read inputs and earlier steps, so that a cycle cannot be written.

    A gated MLP in one call:

        program = Program()
        x = program.input("x")
        gate = program.matmul("gate_proj", x, activation="silu")
        up = program.matmul("up_proj", x)
        program.output(program.matmul("down_proj", program.mul(gate, up)), dtype="f16")

    Names are 1 to 64 characters of [A-Za-z0-9._-]; a step without one is called after its position ("step3").
    The server checks names, shapes and limits.
    """

    def __init__(self) -> None:
        self._proto = matmul_pb2.Program()

    def input(self, name: str) -> Value:
        """Declares an input, [N, K] when it is given at execution."""
        self._proto.inputs.append(name)
        return Value(name)

    def matmul(
        self,
        layer: str,
        x: Value,
        *,
        version: int = 0,
        activation: ActivationLike = Activation.NONE,
        threshold: float | None = None,
        bias: bool = True,
        name: str | None = None,
    ) -> Value:
        """activation(x * W^T + bias), [N, M].

        Args:
          layer: registered name of W [M, K].
          x: input or earlier step with K columns.
          version: version of the layer; 0 is the newest.
          activation: applied last.
          threshold: |x| <= threshold counts as zero (SpMspV); None takes the layer's own default.
          bias: False leaves out the layer's bias.
          name: of the step.
        """
        step = self._step(name)
        step.matmul.layer.CopyFrom(layer_ref(layer, version))
        step.matmul.input = x.name
        step.matmul.activation = parse_enum(Activation, activation, "activation").value  # type: ignore[assignment]
        step.matmul.ignore_bias = not bias
        if threshold is not None:
            step.matmul.activation_threshold = threshold
        return Value(step.name)

    def add(
        self, left: Value, right: Value, *, activation: ActivationLike = Activation.NONE, name: str | None = None
    ) -> Value:
        """activation(left + right), element by element."""
        step = self._step(name)
        step.add.CopyFrom(_elementwise(left, right, activation))
        return Value(step.name)

    def mul(
        self, left: Value, right: Value, *, activation: ActivationLike = Activation.NONE, name: str | None = None
    ) -> Value:
        """activation(left * right), element by element."""
        step = self._step(name)
        step.mul.CopyFrom(_elementwise(left, right, activation))
        return Value(step.name)

    def output(self, *values: Value, dtype: DTypeLike = DType.F32) -> None:
        """Asks for steps to travel back, rounded to `dtype`."""
        for value in values:
            wire = parse_dtype(dtype).value
            self._proto.outputs.append(matmul_pb2.OutputSpec(step=value.name, dtype=wire))  # type: ignore[arg-type]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(self._proto.inputs)

    def to_proto(self) -> matmul_pb2.Program:
        """The wire form; without any output asked for, the last step is the output."""
        proto = matmul_pb2.Program()
        proto.CopyFrom(self._proto)
        if not proto.outputs and proto.steps:
            proto.outputs.append(matmul_pb2.OutputSpec(step=proto.steps[-1].name))
        return proto

    def _step(self, name: str | None) -> matmul_pb2.Step:
        step: matmul_pb2.Step = self._proto.steps.add()
        step.name = f"step{len(self._proto.steps)}" if name is None else name
        return step


def _elementwise(left: Value, right: Value, activation: ActivationLike) -> matmul_pb2.Elementwise:
    wire = parse_enum(Activation, activation, "activation").value
    return matmul_pb2.Elementwise(left=left.name, right=right.name, activation=wire)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RegisteredProgram:
    """A program that the server has checked and planned; execute it by passing this.

    Attributes:
      layer: its first layer, which gateways route its calls by.
    """

    id: str
    inputs: tuple[str, ...]
    layer: str = ""


class Outputs(dict[str, Array]):
    """Output arrays by step name, in the order asked for, and the time spent in the server."""

    timing: Timing

    def __init__(self, arrays: Mapping[str, Array], timing: Timing) -> None:
        super().__init__(arrays)
        self.timing = timing


def execute_request(program: Program | RegisteredProgram, inputs: Any) -> matmul_pb2.ExecuteRequest:
    """The request; `inputs` maps names to arrays or SparseRows, or is the only input's value."""
    if not isinstance(inputs, Mapping):
        if len(program.inputs) != 1:
            raise ValueError(f"inputs: the program has inputs {list(program.inputs)}; pass a mapping")
        inputs = {program.inputs[0]: inputs}
    request = matmul_pb2.ExecuteRequest()
    if isinstance(program, RegisteredProgram):
        request.program_id = program.id
    else:
        request.program.CopyFrom(program.to_proto())
    for name, value in inputs.items():
        _set_input(request.inputs.add(), name, value)
    return request


def _set_input(named: matmul_pb2.NamedInput, name: str, value: Any) -> None:
    named.name = name
    if is_csr(value):
        value = SparseRows.from_csr(value)
    if isinstance(value, SparseRows):
        named.sparse.CopyFrom(value.to_proto())
    else:
        named.dense.CopyFrom(tensor_to_proto(as_rows(value, name)))


def outputs_from_proto(response: matmul_pb2.ExecuteResponse) -> Outputs:
    timing = response.timing
    return Outputs(
        {output.name: tensor_from_proto(output.tensor) for output in response.outputs},
        Timing(
            queue=_seconds(timing.queue),
            kernel=_seconds(timing.kernel),
            total=_seconds(timing.total),
        ),
    )


def _seconds(duration: Any) -> float:
    # Not ToTimedelta(): it cuts at microseconds, and kernels take few of them.
    return float(duration.seconds + duration.nanos * 1e-9)


def matmul_request(
    layer: str,
    x: Any,
    *,
    version: int = 0,
    activation: ActivationLike = Activation.NONE,
    threshold: float | None = None,
    bias: bool = True,
    out_dtype: DTypeLike = DType.F32,
) -> tuple[matmul_pb2.ExecuteRequest, tuple[int, ...]]:
    """The request of one matmul, and the leading dimensions that its output takes over from x."""
    if isinstance(x, SparseRows) or is_csr(x):
        leading: tuple[int, ...] = (int(x.shape[0]),)
    else:
        x = as_array(x, "x", narrow=True)
        if x.ndim == 0:
            raise ValueError("x: expected [..., K], got a scalar")
        leading = x.shape[:-1]
        x = x.reshape(math.prod(leading), x.shape[-1])
    program = Program()
    step = program.matmul(
        layer, program.input("x"), version=version, activation=activation, threshold=threshold, bias=bias, name="y"
    )
    program.output(step, dtype=out_dtype)
    return execute_request(program, {"x": x}), leading


def matmul_result(response: matmul_pb2.ExecuteResponse, leading: tuple[int, ...]) -> Array:
    """The output of matmul_request's request, [*leading, M]."""
    y = tensor_from_proto(response.outputs[0].tensor)
    return y.reshape(*leading, y.shape[-1])
