"""Refusal of requests before Ray and the body's reader see them; imports nothing heavy.

Ray puts what `middlewares` returns in front of every HTTP server of Ray Serve. In a replica, a
request that would be refused costs 1.5 to 2 ms of CPU time when Ray has counted it first, which at
three times the capacity is a tenth of what there is.
"""

import math
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import JSONResponse

#: The replica of this process; None in Ray's other processes.
replica: Any = None
#: Bytes of a candidate in a body of JSON, and in the binary form.
JSON_BYTES, BINARY_BYTES = 6, 4


def middlewares() -> list[Middleware]:
    """What Ray calls (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH)."""
    return [Middleware(Early)]


def busy(seconds: float) -> JSONResponse:
    """A refusal of a request that would wait for so many seconds too long."""
    content = {"error": f"{seconds:.2f} s of work too much waits"}
    return JSONResponse(content, 503, {"Retry-After": str(math.ceil(seconds))})


class Early:
    """Refuses a request by its length, while too much work waits."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers with 503, or leaves the request to Ray."""
        if replica is None or (scope.get("method"), scope.get("path")) != ("POST", "/rank"):
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        bytes_each = BINARY_BYTES if b"msgpack" in headers.get(b"content-type", b"") else JSON_BYTES
        size = int(length[:9]) // bytes_each if length.isdigit() else 0
        seconds = replica.refused_for(size)
        await (busy(seconds) if seconds else self.app)(scope, receive, send)
