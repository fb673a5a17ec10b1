"""The bodies of requests and answers: JSON, and MessagePack with arrays as little-endian bytes."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgpack
import numpy as np
import numpy.typing as npt
import pydantic

JSON, BINARY = "application/json", "application/msgpack"
#: Header by which a balancer can send a user's requests to one replica (`--sticky`).
SESSION = "x-session-id"
INT, FLOAT = np.dtype("<i4"), np.dtype("<f4")


def _items(value: Any) -> Any:
    """Items that are bytes, as an array."""
    if isinstance(value, bytes):
        if len(value) % INT.itemsize:
            raise ValueError(f"candidates have {len(value)} bytes, expected a multiple of 4")
        return np.frombuffer(value, INT).tolist()
    return value


class Body(pydantic.BaseModel):
    """The body of a request.

    Attributes:
      user: the user's id.
      version: the version of the user's features.
      candidates: ids of the items; in the binary form, int32 as bytes.
      timeout_ms: milliseconds after which the client no longer needs the answer; None: the server's
        limit.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    user: int
    version: int = 0
    candidates: Annotated[list[int], pydantic.BeforeValidator(_items)]
    timeout_ms: Annotated[float, pydantic.Field(gt=0)] | None = None


class BodyError(ValueError):
    """A body that cannot be read; `status` is the answer's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def read(content_type: str, body: bytes) -> Body:
    """Reads a request's body.

    Raises:
      BodyError: if it is neither form (415), not well formed (400), or has other fields or types
        than `Body` (422).
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (JSON, BINARY):
        raise BodyError(415, f"Content-Type is {kind or 'missing'}, expected {JSON} or {BINARY}")
    try:
        fields = json.loads(body) if kind == JSON else msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise BodyError(400, f"the body is not {kind}: {error}") from None
    try:
        return Body.model_validate(fields)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in found["loc"]) or "the body"
        raise BodyError(422, f"{where} is {str(found['input'])[:80]}: {found['msg']}") from None


def write(
    content_type: str, scores: npt.NDArray[Any], weights: str, replica: str
) -> tuple[bytes, str]:
    """The body of an answer and its type: the type that the client asked with."""
    if content_type.startswith(BINARY):
        values = np.ascontiguousarray(scores, FLOAT).tobytes()
        return msgpack.packb({"scores": values, "weights": weights, "replica": replica}), BINARY
    fields = {"scores": scores.tolist(), "weights": weights, "replica": replica}
    return json.dumps(fields).encode(), JSON


def ask(
    user: int, items: npt.ArrayLike, *, binary: bool, **fields: Any
) -> tuple[bytes, dict[str, str]]:
    """A client's body and headers."""
    session = {SESSION: str(user)}
    if binary:
        packed = np.ascontiguousarray(items, INT).tobytes()
        body = msgpack.packb({"user": user, "candidates": packed, **fields})
        return body, {"Content-Type": BINARY, **session}
    body = json.dumps({"user": user, "candidates": np.asarray(items).tolist(), **fields}).encode()
    return body, {"Content-Type": JSON, **session}


def answer(content_type: str, body: bytes) -> tuple[npt.NDArray[np.float32], str, str]:
    """A client's view of an answer: scores, version of the weights, replica."""
    if content_type.startswith(BINARY):
        fields = msgpack.unpackb(body)
        return np.frombuffer(fields["scores"], FLOAT), fields["weights"], fields["replica"]
    fields = json.loads(body)
    return np.asarray(fields["scores"], FLOAT), fields["weights"], fields["replica"]
