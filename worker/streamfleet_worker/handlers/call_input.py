"""One input of a handler, which may have to be given to it more than once."""

from __future__ import annotations

from typing import Any

from streamfleet_worker.handlers.value_type import ValueType

_GIVEN = object()


class CallInput:
    """An input as JSON, and as the object that its handler takes.

    A handler may change the object, and a batch that fails is run again in parts: so each run has an object
    of its own. Most inputs run once; they are read once.

    Args:
        text: the JSON.
        kind: what it is read as.
        was_given: it is one of a batch that has failed, and runs again.

    Raises:
        ValidationError: it is no such input.
    """

    __slots__ = ("_kind", "_value", "text")

    def __init__(self, text: bytes, kind: ValueType, *, was_given: bool = False) -> None:
        self.text = text
        self._kind = kind
        self._value = _GIVEN if was_given else kind.read(text)

    @property
    def was_given(self) -> bool:
        """Whether it has been taken before."""
        return self._value is _GIVEN

    def take(self) -> Any:
        """The object, which is the taker's own."""
        value, self._value = self._value, _GIVEN
        return self._kind.read(self.text) if value is _GIVEN else value

    def take_text(self) -> bytes:
        """The JSON, for a taker elsewhere."""
        self._value = _GIVEN
        return self.text
