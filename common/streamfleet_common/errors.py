"""Every error streamfleet raises or puts on the wire.

::

    StreamfleetError
    ├── InvalidRequest          the request itself is wrong; `problems` lists everything wrong with it
    │   ├── TooLong             the prompt and its answer do not fit; `prompt_tokens`, `max_tokens`, `limit`
    │   ├── Unsupported         a well-formed wish that this worker, machine or build cannot fulfil; `feature`
    │   └── Undecodable         bytes that are not a message of this protocol
    ├── QueueFull               accepted and unfinished requests are at the limit; `limit`, `retry_after`
    ├── Conflict                the same id or idempotency key came with another request
    ├── ModelNotFound           nothing serves this queue or this model; `known`
    ├── RequestNotFound         no such request, or its result has expired
    ├── ModelLoadFailed         the weights could not be loaded
    │   └── TokenizerFailed     the weights are there, the tokenizer or chat template is not
    ├── DeadlineExceeded        no answer before the request's deadline
    ├── Cancelled               somebody cancelled the request
    ├── GenerationFailed        the model or its worker failed; `retryable`
    ├── IncompleteGeneration    the events of a request stopped without an end
    └── BrokerUnavailable       Redis cannot be reached, or refuses to work

Each carries a `code` (its name on the wire), a message that says what to do next, and `details`: plain
values (str, int, float, bool, None, lists of str) that survive the trip through `Failure` and `from_wire`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class StreamfleetError(Exception):
    """The root: catch it to catch everything streamfleet raises on purpose.

    `retryable` tells whether the same request may succeed when sent again later.
    """

    code: ClassVar[str] = "error"
    retryable: bool = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def __getattr__(self, name: str) -> Any:
        # Details read like attributes: `error.retry_after`, `error.limit`.
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(f"{type(self).__name__} has no detail {name!r}")

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not copy by themselves.
        return (from_wire, (self.code, self.message, self.details))


class InvalidRequest(StreamfleetError):
    """The request is wrong in itself; sending it again will not help. `problems` names every fault found."""

    code = "invalid_request"
    problems: list[str]

    def __init__(self, message: str, *, problems: Sequence[str] = (), **details: Any) -> None:
        super().__init__(message, problems=list(problems) or [message], **details)


class TooLong(InvalidRequest):
    """The prompt plus `max_tokens` exceeds what the worker holds; all lengths in tokens."""

    code = "too_long"
    prompt_tokens: int
    max_tokens: int
    limit: int

    def __init__(
        self,
        message: str | None = None,
        *,
        prompt_tokens: int,
        max_tokens: int,
        limit: int,
        **details: Any,
    ) -> None:
        if message is None:
            ways_out = []
            if prompt_tokens < limit:
                ways_out.append(f"ask for at most {limit - prompt_tokens} tokens")
            if max_tokens < limit:
                ways_out.append(f"shorten the prompt to at most {limit - max_tokens} tokens")
            way_out = ", or ".join(ways_out) or "shorten the prompt, and ask for fewer tokens"
            message = (
                f"prompt of {prompt_tokens} tokens + max_tokens {max_tokens} is over the limit of "
                f"{limit} tokens: {way_out}"
            )
        super().__init__(message, prompt_tokens=prompt_tokens, max_tokens=max_tokens, limit=limit, **details)


class Unsupported(InvalidRequest):
    """This worker cannot do what was asked, though another might. `feature` names what it lacks.

    That may be a thing its engine or model does, or a device or precision of its machine or build.
    """

    code = "unsupported"
    feature: str


class Undecodable(InvalidRequest):
    """Bytes that are no message of this protocol: bad msgpack, an unknown version, or over a limit."""

    code = "undecodable"


class QueueFull(StreamfleetError):
    """The queue takes no more now; try again after `retry_after` seconds.

    `reason`: too many "requests" or "tokens" are accepted and unfinished, somebody "paused" the queue, or
    Redis's "memory" is nearly full. Or the tenant has as much as its share allows, while others may go on: of
    open requests ("tenant_requests"; wait for some to end), of the tokens these may take ("tenant_tokens";
    that, or ask for fewer), or of a day's tokens ("tenant_budget"; come back after midnight UTC, or have the
    share raised). `limit` is then that of the share. `position`: how many requests would have to end first.
    """

    code = "queue_full"
    retryable = True
    limit: int
    retry_after: float
    reason: str
    position: int


class Conflict(StreamfleetError):
    """The id or idempotency key was used before, with another request."""

    code = "conflict"


class ModelNotFound(StreamfleetError):
    """Nothing serves this queue or model. `known` lists what is served."""

    code = "model_not_found"
    known: list[str]


class RequestNotFound(StreamfleetError):
    """No such request: it was never accepted, or its result has expired."""

    code = "request_not_found"


class ModelLoadFailed(StreamfleetError):
    """The model could not be found, read or built."""

    code = "model_load_failed"


class TokenizerFailed(ModelLoadFailed):
    """The tokenizer or its chat template is missing or broken."""

    code = "tokenizer_failed"


class DeadlineExceeded(StreamfleetError):
    """The request was not answered before its deadline."""

    code = "deadline_exceeded"
    retryable = True


class Cancelled(StreamfleetError):
    """The request was cancelled."""

    code = "cancelled"


class GenerationFailed(StreamfleetError):
    """The model, or the worker that ran it, failed on this request."""

    code = "generation_failed"

    def __init__(self, message: str, *, retryable: bool = False, **details: Any) -> None:
        super().__init__(message, retryable=bool(retryable), **details)
        self.retryable = bool(retryable)


class IncompleteGeneration(StreamfleetError):
    """The events of a request stopped without an end: part of the answer is lost."""

    code = "incomplete_generation"
    retryable = True


class BrokerUnavailable(StreamfleetError):
    """Redis cannot be reached, is too old, or refuses commands; `reason` says which.

    * `unreachable`: no connection, or no answer; `closed`: this side has closed it
    * `loading`, `busy`: it reads its data from disk, or runs somebody's long script
    * `read_only`: it is a replica; `no_replicas`: it has fewer than it must have to write
    * `out_of_memory`, `cannot_persist`: it takes no writes until its memory or disk is mended
    * `forbidden`: the name, password or ACL; `bad_url`: no URL of Redis
    * `cluster`: a cluster that is down, or that keeps the queue on another node
    * `not_durable`: the request may have been accepted, but nothing proves that it would outlive a failure:
      submit it again with the same id
    * `refused`: a command it does not know, or keys that are not ours
    """

    code = "broker_unavailable"
    retryable = True
    reason: str

    def __init__(self, message: str, *, reason: str = "unreachable", **details: Any) -> None:
        super().__init__(message, reason=reason, **details)


def _tree(root: type[StreamfleetError]) -> dict[str, type[StreamfleetError]]:
    found: dict[str, type[StreamfleetError]] = {}
    for child in root.__subclasses__():
        found.update(_tree(child))
    # Last, so that a subclass without a code of its own does not stand for its parent.
    found[root.code] = root
    return found


def from_wire(code: str, message: str, details: Mapping[str, Any]) -> StreamfleetError:
    """The error that `code` names, as its sender raised it; a plain `StreamfleetError` for an unknown one."""
    kind = _tree(StreamfleetError).get(code, StreamfleetError)
    # The codec makes tuples of all sequences; details hold lists.
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in details.items()}
    try:
        return kind(message, **values)
    except TypeError:
        # A peer of another version may leave out a detail that our constructor wants, or send one that the
        # constructor cannot take; the message counts.
        error = kind.__new__(kind)
        Exception.__init__(error, message)
        error.message = message
        error.details = {"problems": [message], **values} if issubclass(kind, InvalidRequest) else values
        error.retryable = bool(values.get("retryable", kind.retryable))
        return error
