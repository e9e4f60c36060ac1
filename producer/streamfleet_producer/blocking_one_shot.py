"""One-shot work for programs without an event loop: the methods of the async client, without `await`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from streamfleet_common.errors import StreamfleetError
from streamfleet_producer import client as asynchronous
from streamfleet_producer.ticket import Options

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Output = TypeVar("_Output")


def _waiting(
    method: Callable[Concatenate[asynchronous.Client, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[OneShot, _P], _T]:
    """The same method for a client that waits."""

    @wraps(method)
    def waits(self: OneShot, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
        return self._call(method(self._client, *arguments, **named))

    return waits


class OneShot(ABC):
    """The one-shot methods of the blocking client, as the async ones in arguments, results and errors."""

    _client: asynchronous.Client

    embed = _waiting(asynchronous.Client.embed)
    classify = _waiting(asynchronous.Client.classify)
    rerank = _waiting(asynchronous.Client.rerank)
    decide = _waiting(asynchronous.Client.decide)

    @overload
    def call(
        self,
        handler: str,
        input: Any,
        *,
        output: None = None,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> Any: ...

    @overload
    def call(
        self,
        handler: str,
        input: Any,
        *,
        output: type[_Output],
        timeout: float | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> _Output: ...

    def call(
        self,
        handler: str,
        input: Any,  # noqa: A002
        *,
        output: Any = None,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> Any:
        return self._call(
            self._client.call(
                handler, input, output=output, timeout=timeout, idempotency_key=idempotency_key, **options
            )
        )

    @overload
    def call_many(
        self,
        handler: str,
        inputs: Sequence[Any],
        *,
        output: None = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> list[Any]: ...

    @overload
    def call_many(
        self,
        handler: str,
        inputs: Sequence[Any],
        *,
        output: type[_Output],
        timeout: float | None = None,
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[_Output]: ...

    @overload
    def call_many(
        self,
        handler: str,
        inputs: Sequence[Any],
        *,
        output: type[_Output],
        timeout: float | None = None,
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> list[_Output | StreamfleetError]: ...

    def call_many(
        self,
        handler: str,
        inputs: Sequence[Any],
        *,
        output: Any = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> list[Any]:
        many: Coroutine[Any, Any, list[Any]] = self._client.call_many(
            handler,
            inputs,
            output=output,
            timeout=timeout,
            return_exceptions=return_exceptions,
            **options,
        )
        return self._call(many)

    @abstractmethod
    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What the work gives, once it is done."""
