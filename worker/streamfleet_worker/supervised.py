"""A process's side of whoever keeps it: the name it was given, and the wire that ends when the keeper does.

A supervised process finds a pipe or socket as its standard input and `STREAMFLEET_SUPERVISED` in its
environment: a JSON object with `name`, `slot`, `tally_fd` and `log_fd`, each of which may be missing. What it
tells is one word a line. The end of its standard input says that its keeper is gone, whatever ended that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, MutableMapping
from typing import Literal

VARIABLE = "STREAMFLEET_SUPERVISED"

Word = Literal["ready", "served", "no_broker"]
"""It takes work; it has answered its first request; it ends since Redis cannot be reached."""


class Supervision:
    """The wire to the keeper. Made once, before anything else may read standard input."""

    def __init__(
        self,
        name: str | None = None,
        slot: str | None = None,
        tally_fd: int | None = None,
        log_fd: int | None = None,
    ) -> None:
        self.name = name
        """What the keeper knows this process by."""
        self.slot = slot
        """Which of the keeper's workers it is."""
        self._tally_fd = tally_fd
        self._log_fd = log_fd
        self._wire = os.dup(0)
        os.set_blocking(self._wire, False)
        # A library that asks the user something must neither wait here nor swallow the end of the wire.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        for fd in (tally_fd, log_fd):
            if fd is not None:
                os.set_inheritable(fd, False)

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Supervision | None:
        """This process's, or None if nobody keeps it. Taken out, so that no child takes it for its own."""
        text = environment.pop(VARIABLE, None)
        return None if text is None else cls(**json.loads(text))

    def tally_socket(self) -> socket.socket | None:
        """The socket by which the keeper asks for this process's tally, if it does. To be taken once."""
        return None if self._tally_fd is None else socket.socket(fileno=self._tally_fd)

    def tell(self, word: Word) -> None:
        """Tell the keeper, if it is still there."""
        with contextlib.suppress(OSError):
            os.write(self._wire, f"{word}\n".encode())

    def watch(self, gone: Callable[[], None]) -> None:
        """Have `gone` called on the running event loop, once, when the keeper is gone."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            with contextlib.suppress(BlockingIOError):
                try:
                    received = os.read(self._wire, 4096)
                except ConnectionError:
                    received = b""
                if not received:
                    loop.remove_reader(self._wire)
                    if self._log_fd is not None:
                        # The keeper passed our lines on; nobody reads them now.
                        os.dup2(self._log_fd, 2)
                    gone()

        loop.add_reader(self._wire, readable)
