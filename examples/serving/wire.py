"""The bodies of requests and answers: JSON, and MessagePack with arrays as little-endian bytes."""

import asyncio
import json
import math
import reprlib
from typing import Annotated, Any

import msgpack
import numpy as np
import numpy.typing as npt
import pydantic
from starlette.requests import Request

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
    candidates: Annotated[list[int], pydantic.FailFast(), pydantic.BeforeValidator(_items)]
    timeout_ms: Annotated[float, pydantic.Field(gt=0)] | None = None


class BodyError(ValueError):
    """A body that cannot be read; `status` and `headers` are those of the answer."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


async def received(request: Request, most: int, seconds: float) -> bytes:
    """Receives a body, of which no more is read than it may have.

    Raises:
      BodyError: if it is compressed (415), has more than `most` bytes (413), or has not come after
        `seconds` (408).
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise BodyError(415, f"Content-Encoding is {coding:.80}, expected none")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > most:
        raise BodyError(
            413, f"the body has {length:.20} bytes, expected at most {most}", Connection="close"
        )
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    message = f"the body has more than {most} bytes"
                    raise BodyError(413, message, Connection="close")
    except TimeoutError:
        message = f"the body has not come within {seconds:g} s"
        raise BodyError(408, message, Connection="close") from None
    return bytes(body)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _fields(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # Readers differ in which of the values they take.
        raise ValueError("a name stands twice in an object")
    return found


def read(content_type: str, body: bytes) -> Body:
    """Reads a request's body.

    Raises:
      BodyError: if it is neither form (415), not well formed (400), or has other fields or types
        than `Body` (422).
    """
    kind = kind_of(content_type)
    if kind not in (JSON, BINARY):
        raise BodyError(415, f"Content-Type is {kind or 'missing'}, expected {JSON} or {BINARY}")
    try:
        if kind == JSON:
            fields = json.loads(body, parse_constant=_no_number, object_pairs_hook=_fields)
        else:
            fields = msgpack.unpackb(body, object_pairs_hook=_fields)
    except RecursionError:
        raise BodyError(400, f"the body is not {kind}: it is nested too deeply") from None
    except (ValueError, msgpack.UnpackException) as error:
        # MessagePack's error of a deep nest has no text.
        reason = str(error) or type(error).__name__
        raise BodyError(400, f"the body is not {kind}: {reason}") from None
    try:
        return Body.model_validate(fields)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in found["loc"]) or "the body"
        # `str` of a nest of 900 lists would be too deep.
        value = "missing" if found["type"] == "missing" else reprlib.repr(found["input"])
        message = f"{where:.80} is {value}: {found['msg']}"
        raise BodyError(422, message) from None
    except ValueError as error:
        # A name with half of a surrogate pair is no Unicode.
        raise BodyError(400, f"the body is not {kind}: {error}") from None


def kind_of(content_type: str) -> str:
    """The media type of a header, in lower case and without parameters."""
    return content_type.partition(";")[0].strip().lower()


def write(
    content_type: str, scores: npt.NDArray[Any], weights: str, replica: str
) -> tuple[bytes, str]:
    """The body of an answer and its type: the type that the client asked with.

    JSON has no NaN and no infinity, so scores that are not finite are null there.
    """
    if kind_of(content_type) == BINARY:
        values = np.ascontiguousarray(scores, FLOAT).tobytes()
        return msgpack.packb({"scores": values, "weights": weights, "replica": replica}), BINARY
    numbers = scores.tolist()
    if not np.isfinite(scores).all():
        numbers = [score if math.isfinite(score) else None for score in numbers]
    return json.dumps({"scores": numbers, "weights": weights, "replica": replica}).encode(), JSON


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
