"""What a client can be told, in OpenAI's error shape.

    GatewayError (status, type, code)
    ├─ InvalidRequest      400   names the field
    │  └─ ContextTooLong   400   no engine of the model has room for the prompt
    ├─ ModelNotFound       404
    ├─ NotFound            404   no such path
    ├─ MethodNotAllowed    405   the path is served, with another method
    ├─ RequestTimeout      408   head or body didn't arrive in time
    ├─ BodyTooLarge        413
    ├─ UnsupportedEncoding 415   the body is compressed
    ├─ TooManyRequests     429   all places are taken, and the queue is full or was too slow
    ├─ HeadersTooLarge     431
    ├─ NoEngineAvailable   503   nobody serves the model now
    ├─ GatewayDraining     503   the gateway is ending
    ├─ UpstreamError       502   engines were tried and failed before the first byte
    └─ UpstreamTimeout     504   an engine didn't answer in time

After the first byte there are no retries: a stream that breaks ends with one error event. `error_shapes.py` tells all
that to clients of the other APIs.
"""

from typing import Any, ClassVar

import orjson

QUOTED_CHARS_MAX = 100


class GatewayError(Exception):
    """An answer to the client. `param` names the field that is wrong, where one is."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param
        self.answer_code = code or self.code

    def body(self) -> bytes:
        """The JSON body of the answer."""
        return error_body(self.message, self.type, self.param, self.answer_code)


class InvalidRequest(GatewayError):
    """The request can't be served as it is."""

    status = 400
    type = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """The prompt can't fit into the context of any engine that serves the model."""

    code = "context_length_exceeded"


class ModelNotFound(GatewayError):
    """No engine has ever served this model here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFound(GatewayError):
    """No such path."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(GatewayError):
    """The path is served with another method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(GatewayError):
    """The request came too slowly."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(GatewayError):
    """The body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedEncoding(GatewayError):
    """The body is compressed, and can't be read to route by it."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"


class TooManyRequests(GatewayError):
    """The gateway has no place for the request now."""

    status = 429
    retry_after_s = 1
    type = "rate_limit_error"
    code = "too_many_requests"


class HeadersTooLarge(GatewayError):
    """The head of the request is over the limit."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class NoEngineAvailable(GatewayError):
    """The model is known, and no engine that serves it is ready."""

    status = 503
    retry_after_s = 1
    type = "service_unavailable"
    code = "no_engine_available"


class GatewayDraining(GatewayError):
    """This gateway takes no requests any more."""

    status = 503
    retry_after_s = 1
    type = "service_unavailable"
    code = "gateway_draining"


class UpstreamError(GatewayError):
    """Every engine tried failed before its first byte."""

    status = 502
    type = "upstream_error"
    code = "upstream_error"


class UpstreamTimeout(GatewayError):
    """An engine took too long."""

    status = 504
    type = "upstream_error"
    code = "upstream_timeout"


def quoted(text: str) -> str:
    """A client's own word in quotes, cut to what a message can bear."""
    return repr(text if len(text) <= QUOTED_CHARS_MAX else text[:QUOTED_CHARS_MAX] + "…")


def error_body(message: str, type_: str, param: str | None, code: str | None) -> bytes:
    """OpenAI's error object as JSON."""
    error: dict[str, Any] = {"message": message, "type": type_, "param": param, "code": code}
    return orjson.dumps({"error": error})
