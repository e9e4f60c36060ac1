"""The terminal while `streamfleet top` has it: another screen, keys, and what a shell's job control does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from streamfleet_producer.cli.top_keyboard import Keyboard

Draw = Callable[[int, int], Sequence[Text]]
"""Gives the lines of a screen of so many columns and lines."""


class Screen:
    """Shows what `draw` gives, as large as the terminal is at that time.

    Args:
        console: of the terminal.
        fd: where its keys come from.
        draw: the lines to show.
        on_key: is told of keys; of "" when the terminal is gone.
        on_fault: is told of what went wrong within a signal's or a key's handling.
    """

    def __init__(
        self,
        console: Console,
        fd: int,
        draw: Draw,
        on_key: Callable[[str], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._console = console
        self._draw = draw
        self._on_key = on_key
        self._on_fault = on_fault
        self._keyboard = Keyboard(fd, self._pressed)
        self._live: Live | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the terminal until the end of the context, however it comes."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTSTP, self._guarded, self._suspend)
        loop.add_signal_handler(signal.SIGWINCH, self._guarded, self.refresh)
        try:
            self._enter()
            yield
        finally:
            self._leave()
            loop.remove_signal_handler(signal.SIGWINCH)
            loop.remove_signal_handler(signal.SIGTSTP)

    def refresh(self) -> None:
        """Draw anew. Each line is written over the one before it, so that nothing flickers."""
        if self._live is not None:
            self._live.update(self._lines(), refresh=True)

    def _lines(self) -> Group:
        width, height = self._console.size
        return Group(*self._draw(width, height))

    def _enter(self) -> None:
        self._keyboard.start()
        self._live = Live(
            self._lines(),
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start(refresh=True)

    def _leave(self) -> None:
        live, self._live = self._live, None
        try:
            if live is not None:
                live.stop()
        finally:
            self._keyboard.stop()

    def _suspend(self) -> None:
        """Stop as any program does at Ctrl-Z, on a terminal as it was; go on when the shell says so."""
        loop = asyncio.get_running_loop()
        self._leave()
        loop.remove_signal_handler(signal.SIGTSTP)  # with it the signal does what it does by itself
        os.kill(os.getpid(), signal.SIGTSTP)
        loop.add_signal_handler(signal.SIGTSTP, self._guarded, self._suspend)
        self._enter()

    def _pressed(self, key: str) -> None:
        self._guarded(lambda: self._on_key(key))

    def _guarded(self, work: Callable[[], None]) -> None:
        # The event loop would only log it, onto the screen.
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the view
            self._on_fault(error)
