"""Answers that are errors, in the format of OpenAI's API: clients raise them by status and show the message."""

from typing import Any

BAD_REQUEST, UNAUTHORISED, NOT_FOUND, CONFLICT, GONE = 400, 401, 404, 409, 410
TOO_MANY, UNAVAILABLE = 429, 503
_SERVER = 500


class ApiError(Exception):
    """A request is answered with an error.

    Args:
        code: A word for programs.
        param: The field of the request that is meant; None for none.
        retry_after: Seconds after which the same request may succeed; None if it never will.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after
        self.closes = False  # whether the connection ends with the answer

    @property
    def document(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= _SERVER else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str = "unsupported") -> ApiError:
    """Return the error of a request that can never be served."""
    return ApiError(BAD_REQUEST, message, code=code, param=param)


def missing(message: str) -> ApiError:
    return ApiError(NOT_FOUND, message, code="not_found")


def conflict(message: str) -> ApiError:
    """Return the error of a request that contradicts an earlier one."""
    return ApiError(CONFLICT, message, code="conflict")


def gone(message: str) -> ApiError:
    """Return the error of an agent's request in a session that is over; clients do not send it again."""
    return ApiError(GONE, message, code="session_over")


def not_now(status: int, message: str, code: str) -> ApiError:
    """Return the error of a request that may succeed a little later."""
    return ApiError(status, message, code=code, retry_after=1)
