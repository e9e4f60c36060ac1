"""What a hostile or broken peer might send: good values with something changed in them."""

from __future__ import annotations

import copy
import random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64 - 1, 10**30, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", " ", "\0", "\ud800", "é" * 100, "x" * 10_000, "7", "true", "null"),
    *([], {}, [[]], [{}], {"": {}}, [None] * 300, {"role": "user"}, {"type": "object", "$ref": "#"}),
    *(
        "../../etc/passwd",
        "{{7*7}}",
        "(a+)+$",
        "ECHO 3",
        "ECHO 3 RAISE@1",
        "RETRY@0",
        "https://example.invalid/x",
        b"\xff\xfe".decode("latin-1"),
    ),
)


class Mutation:
    """Changes told by a seed."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)

    def value(self, good: Any) -> Any:
        """A good value of JSON with one to three changes."""
        changed = copy.deepcopy(good)
        for _ in range(self._source.randint(1, 3)):
            changed = self._changed(changed)
        return changed

    def data(self, good: bytes) -> bytes:
        """Good bytes with some flipped, cut, doubled or put in."""
        data = bytearray(good)
        for _ in range(self._source.randint(1, 6)):
            at = self._source.randrange(len(data) + 1)
            match self._source.randrange(5):
                case 0 if data:
                    data[at % len(data)] = self._source.randrange(256)
                case 1:
                    data[at:at] = self._source.randbytes(self._source.randint(1, 8))
                case 2:
                    del data[at : at + self._source.randint(1, 16)]
                case 3:
                    data[at:at] = data[at : at + self._source.randint(1, 32)]
                case _:
                    del data[at:]
        return bytes(data)

    def one_of(self, values: Any) -> Any:
        return self._source.choice(values)

    def happens(self, share: float) -> bool:
        return self._source.random() < share

    def _changed(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self.happens(0.8):
            name = self._source.choice(list(value))
            match self._source.randrange(6):
                case 0:
                    del value[name]
                case 1:
                    value[self._source.choice(("extra", "", "kind", "x" * 300, "model"))] = self._odd()
                case _:
                    value[name] = self._changed(value[name])
            return value
        if isinstance(value, list) and value and self.happens(0.8):
            at = self._source.randrange(len(value))
            match self._source.randrange(5):
                case 0:
                    del value[at]
                case 1:
                    value.extend([value[at]] * self._source.choice((1, 10, 2000)))
                case _:
                    value[at] = self._changed(value[at])
            return value
        if isinstance(value, str) and self.happens(0.3):
            return value + self._source.choice(("\0", "\ud800", "x" * 1000, "\n", "'\"", "🙂"))
        return self._odd()

    def _odd(self) -> Any:
        if self.happens(0.05):
            nest: Any = []
            for _ in range(self._source.choice((10, 100, 900))):
                nest = [nest]
            return nest
        return copy.deepcopy(self._source.choice(ODD))
