"""Memory shared with a server on the same host: regions, and rings that execute without a call for each request.

The server must have been started with --shared-memory, and the address must be a Unix socket or a loopback address.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from spmmd._proto import sparse_matmul_pb2 as matmul_pb2
from spmmd._proto import types_pb2
from spmmd.arrays import Array
from spmmd.errors import FailedPreconditionError, SpmmdError, UnavailableError, from_code_number, from_rpc_error
from spmmd.program import RegisteredProgram
from spmmd.types import DType, DTypeLike, Timing, parse_dtype

# Calls a unary method of the client: (method, request) -> response; raises SpmmdError.
_Call = Callable[[Any, Any], Any]
_Execute = Callable[[matmul_pb2.ExecuteRequest], matmul_pb2.ExecuteResponse]

_SHM = "/dev/shm"
_PAGE = 4096


class Lease:
    """An open ExecuteStream: its end is how the server learns that the connection has ended."""

    def __init__(self, start: Callable[[Iterator[matmul_pb2.ExecuteStreamRequest]], Any]) -> None:
        self._end = threading.Event()
        self._call = start(self._requests())
        try:
            self._call.initial_metadata()  # The server has the stream.
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        if not self.alive:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "the connection ended")

    @property
    def alive(self) -> bool:
        return bool(self._call.is_active())

    def close(self) -> None:
        self._end.set()
        self._call.cancel()

    def _requests(self) -> Iterator[matmul_pb2.ExecuteStreamRequest]:
        self._end.wait()
        yield from ()


class Region:
    """Shared memory that requests can name instead of carrying bytes; made by Client.create_region().

    It belongs to its client's connection: after the server has restarted, calls that name it raise NotFoundError, and a
    new one must be made. Close it (or use it as a context manager) when no request uses it any more.

    Attributes:
      name: what requests call it.
      size: bytes.
    """

    def __init__(self, memory: SharedMemory, name: str, size: int, buffer: mmap.mmap) -> None:
        self.name = name
        self.size = size
        self._memory = memory
        self._buffer: mmap.mmap | None = buffer

    @property
    def buffer(self) -> mmap.mmap:
        """The memory; ValueError once closed."""
        if self._buffer is None:
            raise ValueError(f"region {self.name} is closed")
        return self._buffer

    def array(self, shape: int | Sequence[int], dtype: DTypeLike = DType.F32, offset: int = 0) -> Array:
        """A view of the memory as an array: filled in place, read in place."""
        kind = parse_dtype(dtype).numpy
        view: Array = np.ndarray(shape, dtype=kind, buffer=self.buffer, offset=offset)
        return view

    def slice(self, offset: int, size: int) -> types_pb2.RegionSlice:
        """For requests made by hand."""
        return types_pb2.RegionSlice(region=self.name, offset=offset, size=size)

    def close(self) -> None:
        """Has the server forget the region; views of it must not be used any more."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        self._memory.unregister(self.name)
        with contextlib.suppress(BufferError):  # A view is still held: the memory goes with it.
            buffer.close()

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SharedMemory:
    """What a client shares with its server. Thread-safe."""

    def __init__(self, stub: Any, call: _Call, metadata: Any) -> None:
        self._stub = stub
        self._call = call
        self._metadata = metadata
        self._lock = threading.Lock()
        self._lease: Lease | None = None

    @property
    def alive(self) -> bool:
        return self._lease is not None and self._lease.alive

    def close(self) -> None:
        with self._lock:
            if self._lease is not None:
                self._lease.close()
            self._lease = None

    def create(self, size: int) -> Region:
        if size < 1:
            raise ValueError(f"size: must be at least 1, got {size}")
        self._open()
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        path = f"{_SHM}/spmmd-{name}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # A full /dev/shm is an OSError here, not a SIGBUS later.
            buffer = mmap.mmap(descriptor, size)
            request = matmul_pb2.RegisterRegionRequest(name=name, size=size, posix_shm=f"/spmmd-{name}")
            self._call(self._stub.RegisterRegion, request)
        finally:
            # Registered or not, the name is not needed: nothing stays behind whatever happens to this process.
            os.unlink(path)
            os.close(descriptor)
        return Region(self, name, size, buffer)

    def unregister(self, name: str) -> None:
        if not self.alive:
            return
        with contextlib.suppress(SpmmdError):  # It went with the connection.
            self._call(self._stub.UnregisterRegion, matmul_pb2.UnregisterRegionRequest(name=name))

    def open_ring(
        self, programs: Sequence[RegisteredProgram | str], tensor_bytes: int, entries: int, spin: float
    ) -> Ring:
        if entries < 2 or entries > 4096 or entries & (entries - 1):
            raise ValueError(f"entries: {entries} is not a power of two within 2 to 4096")
        start = -(-_ring_bytes(entries) // _PAGE) * _PAGE
        region = self.create(start + tensor_bytes)
        ids = [program if isinstance(program, str) else program.id for program in programs]
        try:
            request = matmul_pb2.OpenRingRequest(region=region.name, entries=entries, program_ids=ids)
            response: matmul_pb2.OpenRingResponse = self._call(self._stub.OpenRing, request)
        except BaseException:
            region.close()
            raise
        return Ring(self, region, response.ring_id, entries, start, spin)

    def close_ring(self, ring_id: str) -> None:
        if not self.alive:
            return
        with contextlib.suppress(SpmmdError):
            self._call(self._stub.CloseRing, matmul_pb2.CloseRingRequest(ring_id=ring_id))

    def _open(self) -> None:
        with self._lock:
            if self.alive:
                return
            # Only a server that takes shared memory says when a stream is open.
            info: matmul_pb2.ServerInfoResponse = self._call(self._stub.ServerInfo, matmul_pb2.ServerInfoRequest())
            if "shared_memory" not in info.extensions:
                raise FailedPreconditionError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "this server does not take shared memory; it would with --shared-memory",
                    reason="SHARED_MEMORY_OFF",
                )
            if self._lease is not None:
                self._lease.close()
            self._lease = Lease(lambda requests: self._stub.ExecuteStream(requests, metadata=self._metadata))


# proto/ring/ring_layout.h, version 1.
_MAGIC = 0x474E49524D4D5053
_SUBMISSION = struct.Struct("<QQIIBBB37x")
_TENSOR = struct.Struct("<QII")
_ENTRY_BYTES = 320
_MAX_TENSORS = 16
_COMPLETION = struct.Struct("<QiIQQQQII8x64s192s")
_STATE, _SUBMITTED, _COMPLETED, _CONSUMED, _SERVER_WAITING, _CLIENT_WAITING = 32, 64, 192, 256, 320, 384
_OPEN, _FAILED = 1, 3
_MAX_SLEEP = 0.1

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall


def _ring_bytes(entries: int) -> int:
    return _PAGE + 2 * entries * _ENTRY_BYTES


@dataclass(frozen=True)
class Slot:
    """A tensor of a ring's entry: [rows, cols] elements at a byte offset of the ring's memory."""

    offset: int
    cols: int
    dtype: DType = DType.F32


class Ring:
    """Executes registered programs through shared memory; made by Client.open_ring().

    Inputs and outputs lie in the ring's memory (array()); an entry names them by offset. Several entries may be in
    flight: submit() them, then wait() for as many results, which come in any order. One thread at a time.

        program = client.register_program(mlp)
        with client.open_ring([program], tensor_bytes=1 << 20) as ring:
            x = ring.array((1, k), "f16", offset=0)
            y = ring.array((1, m), "f32", offset=65536)
            x[:] = ...
            ring.execute(1, [spmmd.Slot(0, k, spmmd.DType.F16)], [spmmd.Slot(65536, m)])
    """

    def __init__(
        self, memory: SharedMemory, region: Region, ring_id: str, entries: int, start: int, spin: float
    ) -> None:
        self._memory = memory
        self._region = region
        self._id = ring_id
        self._entries = entries
        self._start = start
        self._spin = spin
        self._submitted = 0
        self._consumed = 0
        self._fence = threading.Lock()
        self._buffer = region.buffer
        # The header as words that are read and written whole. struct.pack_into clears the bytes before it writes them,
        # and a server that looks meanwhile finds a counter that cannot be, and gives the ring up.
        self._words = memoryview(self._buffer)[:_PAGE].cast("I")
        magic, version = struct.unpack_from("<QI", self._buffer, 0)
        if magic != _MAGIC or version != 1:
            self.close()
            raise RuntimeError(f"the server's ring has layout version {version}, this package knows 1")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))

    def array(self, shape: int | Sequence[int], dtype: DTypeLike = DType.F32, offset: int = 0) -> Array:
        """A view of the tensors' memory at a byte offset."""
        return self._region.array(shape, dtype, self._start + offset)

    def submit(
        self,
        rows: int,
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
        *,
        program: int = 0,
        user_data: int = 0,
        timeout: float | None = None,
        background: bool = False,
    ) -> None:
        """Starts an entry.

        Args:
          rows: N.
          inputs, outputs: in the program's order. No output may share bytes with an input or another output.
          program: position in the list that the ring was opened with.
          user_data: comes back with the result.
          timeout: seconds from now.
          background: goes after all others.
        """
        if len(inputs) + len(outputs) > _MAX_TENSORS:
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs: the limit is {_MAX_TENSORS} together")
        if self._submitted - self._consumed >= self._entries:
            raise BlockingIOError(f"{self._entries} entries are in flight: wait for one")
        self._check_open()
        deadline = 0 if timeout is None else max(1, time.monotonic_ns() + int(max(0.0, timeout) * 1e9))
        place = _PAGE + self._submitted % self._entries * _ENTRY_BYTES
        priority = matmul_pb2.PRIORITY_BACKGROUND if background else 0
        _SUBMISSION.pack_into(
            self._buffer, place, user_data, deadline, program, rows, len(inputs), len(outputs), priority
        )
        for position, slot in enumerate((*inputs, *outputs)):
            _TENSOR.pack_into(
                self._buffer, place + 64 + 16 * position, self._start + slot.offset, slot.cols, slot.dtype.value
            )
        self._submitted += 1
        self._store(_SUBMITTED, self._submitted)
        self._wake_server()

    def wait(self, timeout: float | None = None) -> tuple[int, Timing | SpmmdError]:
        """The next result: the entry's user_data, and its times or what went wrong.

        Raises TimeoutError when none comes in time, and UnavailableError when the ring is over.
        """
        now = time.monotonic()
        until = math.inf if timeout is None else now + timeout
        spin_until = now + self._spin
        consumed = self._consumed & 0xFFFFFFFF
        looks = 0
        while self._load(_COMPLETED) == consumed:
            looks += 1
            if looks % 16:
                continue
            now = time.monotonic()
            if now >= until:
                raise TimeoutError("no entry completed in time")
            if now < spin_until:
                os.sched_yield()
                continue
            self._sleep(consumed, min(until - now, _MAX_SLEEP))
        place = _PAGE + (self._entries + self._consumed % self._entries) * _ENTRY_BYTES
        user_data, code, _, queue, kernel, total, retry, reason_bytes, message_bytes, reason, message = (
            _COMPLETION.unpack_from(self._buffer, place)
        )
        self._consumed += 1
        self._store(_CONSUMED, self._consumed)
        self._wake_server()
        if code == 0:
            return user_data, Timing(queue=queue * 1e-9, kernel=kernel * 1e-9, total=total * 1e-9)
        return user_data, _error(
            code,
            message[:message_bytes].decode(errors="replace"),
            reason[:reason_bytes].decode(errors="replace"),
            retry,
        )

    def execute(self, rows: int, inputs: Sequence[Slot], outputs: Sequence[Slot], **options: Any) -> Timing:
        """submit() and wait(), with nothing else in flight; raises what went wrong."""
        self.submit(rows, inputs, outputs, **options)
        _, result = self.wait()
        if isinstance(result, SpmmdError):
            raise result
        return result

    def close(self) -> None:
        """Closes the ring; entries in flight complete first."""
        self._memory.close_ring(self._id)
        self._words.release()
        self._region.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, offset: int) -> int:
        return self._words[offset // 4]

    def _store(self, offset: int, value: int) -> None:
        self._words[offset // 4] = value & 0xFFFFFFFF

    def _full_fence(self) -> None:
        # Taking a lock is the only fence that Python has. Should a machine order less, a wake-up is lost at worst, and
        # neither side sleeps longer than a tenth of a second.
        with self._fence:
            pass

    def _check_open(self) -> None:
        state = self._load(_STATE)
        if state == _OPEN and self._memory.alive:
            return
        text = {_OPEN: "the connection to the server has ended", _FAILED: "the server has given the ring up"}
        raise UnavailableError(grpc.StatusCode.UNAVAILABLE, text.get(state, "the server has closed the ring"))

    def _wake_server(self) -> None:
        self._full_fence()
        if self._load(_SERVER_WAITING) == 0:
            return
        self._store(_SERVER_WAITING, 0)
        if _SYS_FUTEX is not None:
            _syscall(_SYS_FUTEX, ctypes.c_void_p(self._base + _SERVER_WAITING), _FUTEX_WAKE, 2**31 - 1, None, None, 0)

    def _sleep(self, consumed: int, seconds: float) -> None:
        self._store(_CLIENT_WAITING, 1)
        self._full_fence()
        over: SpmmdError | None = None
        try:
            self._check_open()
        except SpmmdError as error:
            over = error
        empty = self._load(_COMPLETED) == consumed  # After the state: the last completions are stored before that.
        if empty and over is None:
            if _SYS_FUTEX is None:
                time.sleep(0.0001)
            else:
                limit = _Timespec(0, int(seconds * 1e9))
                _syscall(
                    _SYS_FUTEX,
                    ctypes.c_void_p(self._base + _CLIENT_WAITING),
                    _FUTEX_WAIT,
                    1,
                    ctypes.byref(limit),
                    None,
                    0,
                )
        self._store(_CLIENT_WAITING, 0)
        if empty and over is not None:
            raise over


def _error(code: int, message: str, reason: str, retry_ns: int) -> SpmmdError:
    status = status_pb2.Status(code=code, message=message)
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=reason, domain="spmmd")]
    if retry_ns:
        delay = Duration(seconds=retry_ns // 10**9, nanos=retry_ns % 10**9)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed: AnyMessage = status.details.add()
        packed.Pack(detail)
    return from_code_number(code, message, status.SerializeToString())


# Below this many bytes a copy into shared memory and a region's name cost as much as the bytes on the wire
# (docs/shared-memory.md).
MIN_SHARED_BYTES = 256 << 10
_POOL_BYTES = 256 << 20


class Placement:
    """Where the large tensors of one request lie, until its answer has been read."""

    def __init__(self, region: Region, outputs: Mapping[int, tuple[int, int]]) -> None:
        self.region = region
        self.outputs = dict(outputs)  # position of the output: offset, bytes


class Transport:
    """Moves large tensors of a client's requests through regions. Thread-safe.

    Inputs go there from a size on; outputs too, once an earlier answer of the same program has told their widths. What
    the server or the host does not allow is found out once, and everything travels in messages from then on.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._free: list[Region] = []
        self._pooled = 0
        self._off = False
        self._widths: dict[bytes, list[tuple[int, int]]] = {}  # columns and element size by output

    def place(self, request: matmul_pb2.ExecuteRequest) -> tuple[matmul_pb2.ExecuteRequest, Placement | None]:
        """The request with its large inputs in a region; itself and None when it stays as it is."""
        if self._off:
            return request, None
        large = [
            named.dense
            for named in request.inputs
            if named.HasField("dense") and len(named.dense.data) >= MIN_SHARED_BYTES
        ]
        if not large:
            return request, None
        rows = large[0].shape[0]
        sizes = [len(tensor.data) for tensor in large]
        widths = self._widths.get(_key(request), [])
        wanted = [rows * cols * element for cols, element in widths]
        outputs: dict[int, tuple[int, int]] = {}
        end = 0
        offsets = []
        for size in sizes:
            offsets.append(end)
            end += _aligned(size)
        for position, size in enumerate(wanted):
            if size >= MIN_SHARED_BYTES:
                outputs[position] = (end, size)
                end += _aligned(size)
        region = self._take(end)
        if region is None:
            return request, None
        for tensor, offset, size in zip(large, offsets, sizes, strict=True):
            region.buffer[offset : offset + size] = tensor.data
            tensor.region.CopyFrom(region.slice(offset, size))  # In place of the data.
        if outputs and request.WhichOneof("target") == "program":
            for position, (offset, size) in outputs.items():
                request.program.outputs[position].region.CopyFrom(region.slice(offset, size))
        else:
            outputs = {}
        return request, Placement(region, outputs)

    def finish(
        self,
        request: matmul_pb2.ExecuteRequest,
        response: matmul_pb2.ExecuteResponse | None,
        placement: Placement | None,
    ) -> None:
        """Reads the outputs out of the region into the response, and gives the region back."""
        if response is not None and len(self._widths) < 1024 and not self._off:
            key = _key(request)
            if key not in self._widths:
                self._widths[key] = [
                    (output.tensor.shape[1], DType(output.tensor.dtype).numpy.itemsize) for output in response.outputs
                ]
        if placement is None:
            return
        if response is not None:
            for position, (offset, size) in placement.outputs.items():
                response.outputs[position].tensor.data = placement.region.buffer[offset : offset + size]
        else:
            self._widths.pop(_key(request), None)
        self._give(placement.region)

    def run(self, request: matmul_pb2.ExecuteRequest, call: _Execute) -> matmul_pb2.ExecuteResponse:
        """call(request), with what is large in a region meanwhile."""
        request, placement = self.place(request)
        response: matmul_pb2.ExecuteResponse | None = None
        try:
            response = call(request)
        except SpmmdError as error:
            fields = [violation.field for violation in error.field_violations]
            gone = error.reason in ("REGION_NOT_FOUND", "REGION_BROKEN")
            if placement is None or not (gone or any(".region" in field for field in fields)):
                raise
            # The server was started anew, or a layer has another shape by now: once more, in a message.
            _restore(request, placement)
            placement.outputs = {}
            response = call(request)
        finally:
            self.finish(request, response, placement)
        return response

    def close(self) -> None:
        with self._lock:
            regions, self._free = self._free, []
            self._off = True
        for region in regions:
            region.close()

    def _take(self, size: int) -> Region | None:
        size = max(1 << 20, 1 << (size - 1).bit_length())
        with self._lock:
            if not self._memory.alive:
                self._free.clear()  # They went with the connection.
                self._pooled = 0
            fitting = [region for region in self._free if size <= region.size <= 4 * size]
            if fitting:
                region = min(fitting, key=lambda candidate: candidate.size)
                self._free.remove(region)
                return region
        try:
            region = self._memory.create(size)
        except (SpmmdError, OSError):
            # Another host's or container's server, one that does not allow it, or a full /dev/shm.
            self._off = True
            return None
        return region

    def _give(self, region: Region) -> None:
        with self._lock:
            if sum(free.size for free in self._free) + region.size <= _POOL_BYTES and not self._off:
                self._free.append(region)
                return
        region.close()


def _restore(request: matmul_pb2.ExecuteRequest, placement: Placement) -> None:
    for named in request.inputs:
        if named.dense.WhichOneof("content") == "region":
            place = named.dense.region
            named.dense.data = placement.region.buffer[place.offset : place.offset + place.size]
    for output in request.program.outputs:
        output.ClearField("region")


def _aligned(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _key(request: matmul_pb2.ExecuteRequest) -> bytes:
    if request.WhichOneof("target") == "program_id":
        return request.program_id.encode()
    program = matmul_pb2.Program()
    program.CopyFrom(request.program)
    for output in program.outputs:
        output.ClearField("region")
    return program.SerializeToString()


def is_local(address: str) -> bool:
    """Whether an address never leaves this host."""
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    return address.startswith(("unix:", "unix-abstract:", "127.", "localhost:", "[::1]:"))
