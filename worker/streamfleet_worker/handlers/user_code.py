"""Where in a handler's own code an error was raised: what a log may have of it, without any value."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import streamfleet_common

_FOLDERS = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")},
    *(
        str(Path(file).resolve().parent) + os.sep
        for file in (streamfleet_common.__file__, Path(__file__).parent)
    ),
)
"""Of the standard library, and ours."""
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def place_of(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """The last place in the user's own code that an error came through, as "rt.py:52 in bug".

    Own is the file of `function`, and whatever is neither installed, nor the standard library's, nor ours.
    The innermost place if there is none; "" if there is no traceback.
    """
    frames = list(_frames(error))
    file = _file_of(function)
    own = [frame for frame in frames if frame[0].co_filename == file or _is_own(frame[0].co_filename)]
    if not own:
        return _told(*frames[-1]) if frames else ""
    there = [frame for frame in own if frame[0].co_filename == file]
    if there and there[-1] is not own[-1]:
        return f"{_told(*own[-1])}, called at {_told(*there[-1])}"
    return _told(*own[-1])


def trace_of(error: BaseException) -> str:
    """Files and lines of a traceback but for ours, one a line, the innermost last; "" if there are none."""
    return "".join(f"\n  {_told(*frame)}" for frame in _frames(error) if not _is_ours(frame[0].co_filename))


def _frames(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    while isinstance(error, BaseExceptionGroup):  # of a task group, whose own frames tell nothing
        error = error.exceptions[0]
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code, trace.tb_lineno
        trace = trace.tb_next


def _file_of(function: Callable[..., Any] | None) -> str | None:
    code = None if function is None else getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else code.co_filename


def _is_ours(file: str) -> bool:
    return file == importlib.__file__ or file.startswith(("<frozen ", *_FOLDERS[-2:]))


def _is_own(file: str) -> bool:
    # Code without a file is generated: by dataclasses, say.
    return not (file.startswith(("<", *_FOLDERS)) or _INSTALLED.search(file))


def _told(code: CodeType, line: int) -> str:
    file = code.co_filename
    folder = str(Path.cwd()) + os.sep
    # Comprehensions are functions to Python 3.11, and to nobody else.
    name = re.sub(r"(\.<locals>\.<\w+>)+$", "", code.co_qualname).rpartition("<locals>.")[2]
    return f"{file.removeprefix(folder)}:{line}" + ("" if name == "<module>" else f" in {name}")
