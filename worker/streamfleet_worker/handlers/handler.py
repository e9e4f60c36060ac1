"""The decorator that makes a handler of a function."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, NoReturn, ParamSpec, Protocol, TypeVar, cast

from streamfleet_common.one_shot import HandlerCard
from streamfleet_worker.handlers.signature import Signature

MAX_NAME_CHARS = 200
MAX_BATCH_SIZE = 4096
MAX_DELAY_MS = 60_000.0
MAX_PROCESSES = 256

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Handler:
    """A function that answers a batch of inputs, and how its batches are made and run."""

    name: str
    function: Callable[..., Any]
    signature: Signature
    max_batch_size: int
    max_delay_ms: float
    contexts: Mapping[str, Callable[[], Any]]
    collate: Callable[[list[Any]], Any] | None
    bisect: bool
    deterministic: bool
    processes: int
    timeout_s: float | None
    path: str
    """Where it is found: `module:function`."""

    def __str__(self) -> str:
        return f"handler {self.name!r}"

    def card(self) -> HandlerCard:
        """How it is called, for those who call it."""
        return HandlerCard(
            input_schema=self.signature.input.schema("validation"),
            output_schema=self.signature.output.schema("serialization"),
            streams=self.signature.streams,
        )

    @property
    def revision(self) -> str:
        """A digest of the file that it is written in; "" if there is none."""
        try:
            source = inspect.getsourcefile(inspect.unwrap(self.function))
            return "" if source is None else hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16]
        except (OSError, TypeError):
            return ""


class Handled(Protocol[P, R_co]):
    """A function as it was, which also knows the handler that was made of it."""

    handler: Handler

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """What the function gives."""


def handler(
    name: str,
    *,
    max_batch_size: int = 16,
    max_delay_ms: float = 20.0,
    context: Mapping[str, Callable[[], Any]] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    bisect: bool = True,
    deterministic: bool = False,
    processes: int = 0,
    timeout_s: float | None = None,
    **unknown: Never,
) -> Callable[[Callable[P, R_co]], Handled[P, R_co]]:
    """Make a handler of a function, which stays the function that it was.

    The function takes a list of inputs and gives a list with one place for each: an output, or an exception
    that is about this item alone. It may be async. One that yields such lists gives its outputs in parts.
    `docs/handlers.md` tells it all.

    Args:
        name: what it is called by.
        max_batch_size: inputs in one batch.
        max_delay_ms: how long the oldest input may wait, since it was accepted, for a batch to fill.
        context: what else the function takes, by name, and what makes it: called once, on the thread or in
            the process that runs the function. It may be async; one that yields is gone on with at the end.
        collate: makes of the list of inputs what the function takes in its place.
        bisect: when the function raises, find out which items make it, by calling it again with the others.
            Without, all items of the batch fail.
        deterministic: equal inputs have equal outputs: those that wait together are computed once, and
            answers may be kept.
        processes: run it in so many processes of its own; 0 is the worker's own, on one thread of it.
        timeout_s: a batch that takes longer fails, and its process is ended. Only with `processes`.
        **unknown: refused.

    Raises:
        TypeError, ValueError: it makes no handler, and why.
    """
    for word in unknown:
        _refuse_unknown(word)
    given: Any = name
    if not isinstance(given, str):
        raise TypeError('a handler has a name: write @handler("sentiment")')
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"a handler's name has 1 to {MAX_NAME_CHARS} characters, not {len(name)}")
    _check_within("max_batch_size", max_batch_size, 1, MAX_BATCH_SIZE)
    _check_within("max_delay_ms", max_delay_ms, 0, MAX_DELAY_MS)
    _check_within("processes", processes, 0, MAX_PROCESSES)
    if timeout_s is not None:
        if not processes:
            raise ValueError("timeout_s needs processes=1 or more: only a process can be ended in a batch")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s is a number of seconds above 0, not {timeout_s}")
    contexts = dict(context or {})
    for named, factory in contexts.items():
        _check_factory(named, factory)

    def make(function: Callable[P, R_co]) -> Handled[P, R_co]:
        if not inspect.isfunction(cast("Any", function)):
            raise TypeError(f"{function!r} is no function: write def, and @handler(...) above it")
        path = f"{function.__module__}:{function.__qualname__}"
        if processes and "<locals>" in path:
            raise TypeError(
                f"{path} is made by a function, where no other process finds it: define it at the top"
            )
        made = cast("Handled[P, R_co]", function)
        made.handler = Handler(
            name=name,
            function=function,
            signature=Signature.of(function, contexts, collate),
            max_batch_size=max_batch_size,
            max_delay_ms=max_delay_ms,
            contexts=contexts,
            collate=collate,
            bisect=bisect,
            deterministic=deterministic,
            processes=processes,
            timeout_s=timeout_s,
            path=path,
        )
        return made

    return make


def _refuse_unknown(word: str) -> NoReturn:
    options = [name for name in inspect.signature(handler).parameters if name not in ("name", "unknown")]
    close = difflib.get_close_matches(word, options, n=1)
    advice = f"did you mean {close[0]}?" if close else f"it takes {', '.join(options)}"
    raise TypeError(f"handler() takes no {word}: {advice}")


def _check_within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is from {least:g} to {most:g}, not {value:g}")


def _check_factory(name: str, factory: Callable[[], Any]) -> None:
    if not callable(factory):
        raise TypeError(f"context {name!r} is {type(factory).__name__}: give a function that makes it")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # one written in C, which tells nothing
        return
    try:
        signature.bind()
    except TypeError as error:
        called = getattr(inspect.unwrap(factory), "__qualname__", repr(factory))
        raise TypeError(
            f"context {name!r} is made by {called}, which cannot be called without arguments ({error}): "
            "wrap it in a function that takes none"
        ) from None
