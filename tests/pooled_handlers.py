"""Handlers for pools of processes, in a module that these processes can import."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from streamfleet_worker import END, Retry, handler

FOLDER = "POOLED_HANDLERS_FOLDER"
"""Where the processes leave their marks."""


def mark(name: str) -> str:
    with (Path(os.environ[FOLDER]) / name).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return name


def kept() -> Iterator[int]:
    """A context that leaves a mark when it is built, and when it is cleaned up."""
    mark("built")
    yield os.getpid()
    mark("closed")


def act(item: dict[str, Any]) -> Any:
    """What one item wants to happen to it, or to the process."""
    does: dict[str, Callable[[], Any]] = {
        "pid": os.getpid,
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": lambda: os._exit(3),
        "hang": lambda: [mark("hangs"), signal.sigwait([signal.SIGUSR1])],
        # Years, for all of which the interpreter is held.
        "hold": lambda: [mark("hangs"), re.match(r"(a+)+$", "a" * 60 + "b")],
        "fill": lambda: "x" * item["value"],
        "retry": lambda: Retry(2.5),
        "error": lambda: ValueError("no"),
        "invalid": object,
        "memory": lambda: _raise(MemoryError("no room")),
        "raise": lambda: _raise(ValueError("no")),
    }
    kind = item.get("do")
    return item.get("value") if kind is None else does[kind]()


def _raise(error: BaseException) -> Any:
    raise error


@handler("act", max_batch_size=8, processes=2, context={"pid": kept})
def run(batch: list[dict[str, Any]], pid: int) -> list[Any]:
    """Do what each item says."""
    assert pid == os.getpid()
    return [act(item) for item in batch]


@handler("act", max_batch_size=8, processes=1, timeout_s=1.0)
def hurry(batch: list[dict[str, Any]]) -> list[Any]:
    """The same, within a second."""
    return [act(item) for item in batch]


@handler("act", max_batch_size=8, processes=1, bisect=False)
def send(batch: list[dict[str, Any]]) -> list[Any]:
    """The same, but never twice."""
    mark("sent")
    return [act(item) for item in batch]


@handler("act", max_batch_size=8, processes=1)
async def later(batch: list[dict[str, Any]]) -> list[Any]:
    """The same, at once."""
    return list(await asyncio.gather(*(asyncio.to_thread(act, item) for item in batch)))


@handler("spell", max_batch_size=8, processes=2)
def spell(batch: list[str]) -> Iterator[list[str | None]]:
    """Letter by letter; "!" kills the process, "…" goes on for ever."""
    for place in range(1 << 40):
        letters = [text[place] if place < len(text) else "…" if text[-1:] == "…" else END for text in batch]
        if "!" in letters:
            os.kill(os.getpid(), signal.SIGKILL)
        yield letters


@handler("spell", max_batch_size=8, processes=1)
async def spell_later(batch: list[str]) -> AsyncIterator[list[str | None]]:
    """Letter by letter, asynchronously."""
    for place in range(max(map(len, batch))):
        await asyncio.sleep(0)
        yield [text[place] if place < len(text) else END for text in batch]


def once() -> int:
    """Can be built as often as the folder has a file "allowed" to take away."""
    mark("tried")
    (Path(os.environ[FOLDER]) / "allowed").unlink()
    return 1


@handler("act", processes=1, context={"model": once})
def fragile(batch: list[dict[str, Any]], model: int) -> list[Any]:
    """Do what each item says, as long as the process lives."""
    return [act(item) for item in batch]


def fatal() -> None:
    """A context that takes the process with it."""
    os._exit(7)


@handler("act", processes=1, context={"model": fatal})
def doomed(batch: list[dict[str, Any]], model: None) -> list[Any]:
    """Never runs."""
    return batch
