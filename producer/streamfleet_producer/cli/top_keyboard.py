"""Keys of a terminal, one by one as they are pressed. Of Unix alone: Windows has no `termios`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import termios
import tty
from collections.abc import Callable

ESCAPE_S = 0.1
"""So long after an escape the rest of a longer sequence may come, over a slow line in pieces."""
_CODES = {
    b"A": "up",
    b"B": "down",
    b"C": "right",
    b"D": "left",
    b"H": "home",
    b"F": "end",
    b"1~": "home",
    b"4~": "end",
    b"5~": "pgup",
    b"6~": "pgdn",
    b"7~": "home",
    b"8~": "end",
}
_PLAIN = {b"\r": "enter", b"\n": "enter", b"\t": "tab"}
_MOST = 16
"""No sequence is as long."""


def keys_of(data: bytes) -> tuple[list[str], bytes]:
    """The keys that these bytes stand for, and what may be the beginning of another.

    A key is its character, or one of up, down, left, right, home, end, pgup, pgdn, enter, tab, esc. What no
    key of ours sends is left out.
    """
    keys: list[str] = []
    while data:
        if data[:1] == b"\x1b":
            if data[1:2] in (b"[", b"O"):
                end = next((at for at in range(2, min(len(data), _MOST)) if 0x40 <= data[at] <= 0x7E), None)
                if end is None:
                    if len(data) < _MOST:
                        break
                    data = data[_MOST:]
                    continue
                code = _CODES.get(data[2 : end + 1])
                keys += [code] if code else []
                data = data[end + 1 :]
                continue
            if len(data) == 1:
                break
            keys.append("esc")
            data = data[1:]
            continue
        first, data = data[:1], data[1:]
        key = _PLAIN.get(first) or (first.decode() if 0x20 <= first[0] < 0x7F else "")
        keys += [key] if key else []
    return keys, data


class Keyboard:
    """Tells `on_key` of each key from `start` to `stop`, which gives the terminal its old settings back.

    Nothing is echoed meanwhile. Signals stay as they are: Ctrl-C and Ctrl-Z come as such. `on_key` is called
    with "" when the terminal is gone.
    """

    def __init__(self, fd: int, on_key: Callable[[str], None]) -> None:
        self._fd = fd
        self._on_key = on_key
        self._before: list[object] | None = None
        self._begun = b""
        self._alone: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take the terminal's input."""
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSADRAIN)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def stop(self) -> None:
        """Give it back; may be called twice."""
        before, self._before = self._before, None
        if before is None:
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        self._forget()
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)  # type: ignore[arg-type]

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1024)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._on_key("")
            return
        begun = self._begun
        self._forget()
        keys, self._begun = keys_of(begun + data)
        if self._begun:
            self._alone = asyncio.get_running_loop().call_later(ESCAPE_S, self._escape)
        for key in keys:
            self._on_key(key)

    def _forget(self) -> None:
        self._begun = b""
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    def _escape(self) -> None:
        self._forget()
        self._on_key("esc")
