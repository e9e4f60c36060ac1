"""Calls of handlers: a value in, a value out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

from streamfleet_common.errors import GenerationFailed, InvalidRequest, StreamfleetError
from streamfleet_common.one_shot import CallRequest
from streamfleet_common.schemas import End, Request
from streamfleet_producer.handler_values import plain_input, typed_output
from streamfleet_producer.one_shot import listed
from streamfleet_producer.ticket import Options
from streamfleet_producer.token_stream import PartStream

_Output = TypeVar("_Output")


class HandlerCalls(ABC):
    """How a client calls handlers, which are functions that workers serve by name.

    `timeout` is in seconds; for `options` see `Options`. Usage, timing and the worker's memory come with
    `run` and a request of one's own: of `end = await fleet.run(CallRequest(handler="h", input=...))` they are
    `end.usage`, `end.timing` and `end.memory`, beside `end.output`.

    Raises, from every method:
        ModelNotFound: no worker of the queue serves such a handler; `known` lists those that there are.
        InvalidRequest: the handler takes no such input; told before anything is submitted, by its schema.
        QueueFull: try again after `retry_after` seconds.
        DeadlineExceeded: no answer before the timeout, or before the deadline and its grace.
        GenerationFailed: the handler failed, or its output is not of the type that was asked for.
        Cancelled, IncompleteGeneration: how it ended otherwise.
    """

    @overload
    async def call(
        self,
        handler: str,
        input: Any,
        *,
        output: None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> Any: ...

    @overload
    async def call(
        self,
        handler: str,
        input: Any,
        *,
        output: type[_Output],
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> _Output: ...

    async def call(
        self,
        handler: str,
        input: Any,  # noqa: A002
        *,
        output: Any = None,
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """What a handler makes of an input: a JSON value, or the pydantic model that the handler takes.

        The output is a JSON value, or of the type `output` if that is given; of an output that comes in parts
        it is the last one (see `call_stream`). With an idempotency key that was used before, the existing
        request's answer is waited for; it raises Conflict if that was for another input. Else it raises as
        said at `HandlerCalls`.
        """
        request = CallRequest(handler=handler, input=plain_input(input))
        end = await self.run(request, timeout=timeout, idempotency_key=idempotency_key, **options)
        return typed_output(handler, end.output, output)

    @overload
    async def call_many(
        self,
        handler: str,
        inputs: Sequence[Any],
        *,
        output: None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> list[Any]: ...

    @overload
    async def call_many(
        self,
        handler: str,
        inputs: Sequence[Any],
        *,
        output: type[_Output],
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[_Output]: ...

    @overload
    async def call_many(
        self,
        handler: str,
        inputs: Sequence[Any],
        *,
        output: type[_Output],
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> list[_Output | StreamfleetError]: ...

    async def call_many(
        self,
        handler: str,
        inputs: Sequence[Any],
        *,
        output: Any = None,
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> list[Any]:
        """What a handler makes of each input, in their order; submitted together, as by `run_many`.

        With `return_exceptions` a failure takes the place of its output; otherwise the first one is raised,
        and what is still open is cancelled. Else as `call`.
        """
        requests: list[CallRequest | InvalidRequest] = []
        for value in listed("inputs", inputs):
            try:
                requests.append(CallRequest(handler=handler, input=plain_input(value)))
            except InvalidRequest as error:
                if not return_exceptions:
                    raise
                requests.append(error)
        called = [request for request in requests if isinstance(request, CallRequest)]
        ended: list[End | StreamfleetError] = await self.run_many(  # type: ignore[call-overload]
            called, timeout=timeout, return_exceptions=return_exceptions, **options
        )
        ends = iter(ended)
        outputs: list[Any] = []
        for request in requests:
            end = next(ends) if isinstance(request, CallRequest) else request
            try:
                outputs.append(typed_output(handler, end.output, output) if isinstance(end, End) else end)
            except GenerationFailed as error:
                if not return_exceptions:
                    raise
                outputs.append(error)
        return outputs

    @abstractmethod
    def call_stream(
        self,
        handler: str,
        input: Any,  # noqa: A002
        *,
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> PartStream:
        """The parts of a handler's output as it gives them; see `PartStream`."""

    # --- what a client has for it

    @abstractmethod
    async def run(
        self,
        request: Request,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> End:
        """Submit a request and wait for its answer."""

    @overload
    async def run_many(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[End]: ...

    @overload
    async def run_many(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> list[End | StreamfleetError]: ...

    @abstractmethod
    async def run_many(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> list[End] | list[End | StreamfleetError]:
        """Submit requests together and wait for all answers."""
