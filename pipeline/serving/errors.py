"""How a call to the serving engine can end without vectors; the HTTP layer gives each one its status.

    ServingError
    ├── Overloaded        429  the queue is full; come back after ``retry_after_s``
    ├── DeadlineExceeded  504  not computed by the call's deadline
    ├── TooLong           413  a text above the length limit where truncation was not wanted
    ├── NotEmbeddable     422  a text without a token, or whose vector is not finite
    ├── Cancelled              the caller hung up
    └── EngineDown        503  the process that computes died, or the server is going down
"""

from __future__ import annotations


class ServingError(Exception):
    """One line: what happened, and what the caller can do."""

    reason = "error"
    """Its name in the metrics."""


class Overloaded(ServingError):
    """The queue is full.

    Attributes:
        retry_after_s: when what waits now will have been computed, at the measured rate.
    """

    reason = "overloaded"

    def __init__(self, retry_after_s: float, what: str) -> None:
        super().__init__(f"{what}; try again in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ServingError):
    """The deadline passed first; what was not computed by then is not computed any more."""

    reason = "deadline"


class TooLong(ServingError):
    """A text is longer than the model takes, and the caller wants no truncation.

    Attributes:
        index: of the text in the call, from 0.
        num_tokens: of the text; a lower bound for a text far above the limit.
        limit: tokens that the model takes, special ones included.
    """

    reason = "too_long"

    def __init__(self, index: int, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"text {index} has {num_tokens} tokens, the limit is {limit}; shorten it or ask for truncation"
        )
        self.index, self.num_tokens, self.limit = index, num_tokens, limit


class NotEmbeddable(ServingError):
    """A text has no vector.

    Attributes:
        index: of the text in the call, from 0.
    """

    reason = "not_embeddable"

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"text {index} {why}")
        self.index = index


class Cancelled(ServingError):
    """The caller hung up before its texts were computed."""

    reason = "cancelled"


class EngineDown(ServingError):
    """Nothing can compute now, or what computed this died."""

    reason = "down"
