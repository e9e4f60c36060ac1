"""The Lua scripts of the protocol, and how they are called."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from redis.exceptions import NoScriptError

ScriptName = Literal[
    "submit",
    "start",
    "renew",
    "emit",
    "finish",
    "cancel",
    "release",
    "handback",
    "sweep",
    "announce",
    "backlog",
    "move",
]
_PARTS: dict[ScriptName, tuple[str, ...]] = {
    # It stands on its own, since other languages send its very text.
    "submit": (),
    "start": ("record", "recovery"),
    "renew": ("record",),
    "emit": ("record",),
    "finish": ("record", "recovery"),
    "cancel": ("record",),
    "release": ("record", "recovery"),
    "handback": ("record", "recovery"),
    "sweep": ("record", "recovery"),
    "announce": ("record", "recovery"),
    "backlog": (),
    "move": ("record",),
}
"""What stands before each script."""


@dataclass(frozen=True, slots=True)
class Script:
    """One protocol step for a whole batch: its text and the name under which Redis caches it."""

    text: str
    sha: str

    @classmethod
    def load(cls, name: ScriptName, *, flags: bool = True) -> Script:
        """Read `lua/NAME.lua` from the package.

        The `#!lua` line states whether the script may run when memory is full. Without `flags` it is left
        away: the in-process server of the unit tests knows none.
        """
        folder = files("streamfleet_common") / "lua"
        first, _, body = (folder / f"{name}.lua").read_text().partition("\n")
        body = "".join((folder / f"{part}.lua").read_text() for part in _PARTS[name]) + body
        text = f"{first}\n{body}" if flags else body
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    async def call(self, execute: Callable[..., Awaitable[Any]], tag: str, args: Sequence[Any]) -> Any:
        """Run it on the keys under `tag`, by its name where the server knows it already."""
        try:
            return await execute("EVALSHA", self.sha, 1, tag, *args)
        except NoScriptError:
            return await execute("EVAL", self.text, 1, tag, *args)
