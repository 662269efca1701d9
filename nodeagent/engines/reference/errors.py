"""What can go wrong in the reference engine.

EngineError
├─ ModelFileError    the model file can't be used; one sentence says why
├─ InvalidRequest    400, or 404/408/413/415 by `status`: the request can't be served as it stands
└─ Overloaded        429: the queue is full; 503: the engine is stopping
"""


class EngineError(Exception):
    """Root of the tree; its text is fit to be shown to a user."""


class ModelFileError(EngineError):
    """The file is no model that this engine can run."""


class InvalidRequest(EngineError):
    """The request names something that can't be served; `param` is the field at fault, OpenAI's way."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class Overloaded(EngineError):
    """There is no room for the request now; `status` is 429 where a retry here may help, else 503."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
