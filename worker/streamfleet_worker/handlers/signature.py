"""What a handler's function tells of itself: what it takes, what it gives, what it wants to be given."""

from __future__ import annotations

import functools
import inspect
import types
from collections import abc
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic.errors import PydanticUserError

from streamfleet_worker.handlers.value_type import ValueType

_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)
_ITERATORS = (
    abc.Iterator,
    abc.Generator,
    abc.AsyncIterator,
    abc.AsyncGenerator,
    abc.AsyncIterable,
)


@dataclass(frozen=True)
class Signature:
    """What one item's input and output are, and whether outputs come in parts."""

    input: ValueType
    output: ValueType
    """Or one part of it."""
    streams: bool

    @classmethod
    def of(
        cls, function: Callable[..., Any], contexts: Collection[str], collate: Callable[..., Any] | None
    ) -> Signature:
        """Read it off the function's parameters and annotations.

        Raises:
            TypeError: they make no handler; its words say what to write instead.
        """
        name = getattr(function, "__qualname__", repr(function))
        parameters = list(inspect.signature(function).parameters.values())
        _check_parameters(name, parameters, contexts)
        batch = parameters[0].name
        returns = _annotation(function, "return")
        streams = _yields(function)
        if get_origin(returns) in _ITERATORS or (streams and get_origin(returns) is abc.Iterable):
            streams = True
            returns = get_args(returns)[0]
        elif streams and returns is not Any:
            raise TypeError(f"{name} yields: annotate what it gives as Iterator[list[Output | None]]")
        if collate is None:
            inputs = _annotation(function, batch)
            what = f"{batch!r} of {name}"
            advice = "write list[Input], or give a collate= that makes something else of the inputs"
        else:
            inputs = _first_annotation(collate)
            what = f"the inputs that the collate= of {name} takes"
            advice = "write list[Input]"
        outputs = f"what {name} {'yields' if streams else 'returns'}"
        return cls(
            input=_value_type(what, _element(what, inputs, advice)),
            output=_value_type(
                outputs, _output(_element(outputs, returns, "write list[Output]"), streams=streams)
            ),
            streams=streams,
        )


def _check_parameters(name: str, parameters: list[inspect.Parameter], contexts: Collection[str]) -> None:
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise TypeError(f"{name} must take the batch as its first parameter: def {name}(batch): ...")
    others = parameters[1:]
    named = {
        one.name
        for one in others
        if one.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    optional = {
        one.name
        for one in others
        if one.default is not inspect.Parameter.empty
        or one.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }
    missing = [one.name for one in others if one.name not in optional and one.name not in contexts]
    if missing:
        raise TypeError(
            f"{name} takes {', '.join(missing)}, and context= has no such name: "
            f'write context={{"{missing[0]}": what_makes_it}}'
        )
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in others)
    extra = [] if anything else [one for one in contexts if one not in named]
    if extra:
        raise TypeError(
            f"context= has {', '.join(extra)}, and {name} takes no parameter of that name after the batch: "
            "add it, or leave it out of context="
        )


def _yields(function: Callable[..., Any]) -> bool:
    inner = inspect.unwrap(function)
    return inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner)


def _annotation(function: Callable[..., Any], parameter: str) -> Any:
    """What a parameter, or the result, is annotated with; `Any` if nothing.

    The others are not looked at: what they name may be there for type checkers only.
    """
    while isinstance(function, functools.partial):
        function = function.func
    inner = inspect.unwrap(function)
    annotations = getattr(inner, "__annotations__", {})
    if parameter not in annotations:
        return Any

    def one() -> None:
        pass

    one.__annotations__ = {parameter: annotations[parameter]}
    try:
        return get_type_hints(one, getattr(inner, "__globals__", {}), include_extras=True)[parameter]
    except NameError as error:
        raise TypeError(
            f"the annotation {annotations[parameter]!r} of {inner.__qualname__} cannot be read ({error}): "
            "define what it names at the top of the module, above the handler, and import it at run time"
        ) from None


def _first_annotation(function: Callable[..., Any]) -> Any:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # one written in C, which tells nothing
        return Any
    return _annotation(function, next(iter(parameters), ""))


def _element(what: str, annotation: Any, advice: str) -> Any:
    """What a list is a list of."""
    if annotation is Any or annotation in _LISTS:
        return Any
    if get_origin(annotation) not in _LISTS:
        shown = getattr(annotation, "__qualname__", annotation)
        raise TypeError(f"{what} is annotated as {shown}, which has no place for each item: {advice}")
    return get_args(annotation)[0]


def _output(annotation: Any, *, streams: bool) -> Any:
    """What is left when all is taken away that is no output: errors, and None in place of a part."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    left = [
        one
        for one in get_args(annotation)
        if not (isinstance(one, type) and issubclass(one, BaseException))
        and not (streams and one is type(None))
    ]
    return Union[tuple(left)] if left else Any  # noqa: UP007 (the members are known at run time only)


def _value_type(what: str, annotation: Any) -> ValueType:
    try:
        return ValueType(annotation)
    except PydanticUserError as error:
        first = str(error).partition("\n")[0]
        raise TypeError(
            f"{what} cannot be written as JSON: use pydantic models, or types that pydantic knows ({first})"
        ) from None
