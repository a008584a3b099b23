"""Errors of the server, one class a canonical gRPC code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2


@dataclass(frozen=True)
class FieldViolation:
    """A field of the request that the server refused, by its path ("program.steps[2].matmul.layer")."""

    field: str
    description: str


class SpmmdError(Exception):
    """A call that failed.

    Attributes:
      code: canonical gRPC code.
      message: the server's text.
      reason: stable upper-snake reason ("LAYER_NOT_FOUND"), or empty when the failure is not from the server itself.
      metadata: the reason's details.
      field_violations: the fields refused; not empty for INVALID_ARGUMENT.
      retry_after: seconds that the server asks to wait, for RESOURCE_EXHAUSTED from admission; else None.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        field_violations: Iterable[FieldViolation] = (),
        retry_after: float | None = None,
    ) -> None:
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = metadata or {}
        self.field_violations = tuple(field_violations)
        self.retry_after = retry_after
        super().__init__(code, message)

    def __str__(self) -> str:
        text = f"{self.code.name}: {self.message}"
        # The server may name the field in its text as well; say it once.
        extra = [f"{v.field}: {v.description}" for v in self.field_violations if v.description not in self.message]
        return f"{text} ({'; '.join(extra)})" if extra else text


class CancelledError(SpmmdError):
    """CANCELLED."""


class InvalidArgumentError(SpmmdError):
    """INVALID_ARGUMENT: see `field_violations`."""


class DeadlineExceededError(SpmmdError):
    """DEADLINE_EXCEEDED."""


class NotFoundError(SpmmdError):
    """NOT_FOUND: no such layer, version, program or file."""


class AlreadyExistsError(SpmmdError):
    """ALREADY_EXISTS."""


class PermissionDeniedError(SpmmdError):
    """PERMISSION_DENIED."""


class ResourceExhaustedError(SpmmdError):
    """RESOURCE_EXHAUSTED: no memory for a layer, or the queue is full (`retry_after` is set then)."""


class FailedPreconditionError(SpmmdError):
    """FAILED_PRECONDITION."""


class UnimplementedError(SpmmdError):
    """UNIMPLEMENTED: this server or backend cannot do it."""


class InternalError(SpmmdError):
    """INTERNAL: a fault of the server."""


class UnavailableError(SpmmdError):
    """UNAVAILABLE: not reachable, draining, or a device was lost."""


class DataLossError(SpmmdError):
    """DATA_LOSS: the content received is not the content announced."""


class UnauthenticatedError(SpmmdError):
    """UNAUTHENTICATED: the token or certificate is missing or wrong."""


_CLASSES: dict[grpc.StatusCode, type[SpmmdError]] = {
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}
_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS_KEY = "grpc-status-details-bin"


def make_error(code: grpc.StatusCode, message: str, status_details: bytes = b"") -> SpmmdError:
    """The error for a code, a text and a serialised google.rpc.Status (possibly empty or garbled)."""
    reason = ""
    metadata: dict[str, str] = {}
    violations: list[FieldViolation] = []
    retry_after: float | None = None
    status = status_pb2.Status()
    try:
        status.ParseFromString(status_details)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            bad_request = error_details_pb2.BadRequest()
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(bad_request):
                violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    except DecodeError:
        pass  # The code and the text stand on their own.
    cls = _CLASSES.get(code, SpmmdError)
    return cls(code, message, reason=reason, metadata=metadata, field_violations=violations, retry_after=retry_after)


def from_code_number(code: int, message: str, status_details: bytes) -> SpmmdError:
    """The error for a numeric code, as stream responses carry it."""
    return make_error(_BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN), message, status_details)


def from_rpc_error(error: Any) -> SpmmdError:
    """The error for a grpc.RpcError of a call, synchronous or asynchronous."""
    details = b""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            details = value
    return make_error(error.code(), error.details() or "", details)
