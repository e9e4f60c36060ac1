"""Processes that a handler forks: they end, and what they do is not the worker's doing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from served_handler import ServedHandler, told
from streamfleet_worker import handler

Serve = Callable[..., ServedHandler]


def _fail() -> None:
    raise ValueError("in the child")


WAYS: list[tuple[Callable[[], Any], int]] = [
    (lambda: None, 0),
    (sys.exit, 0),
    (lambda: sys.exit(3), 3),
    (lambda: sys.exit("words"), 1),
    (_fail, 1),
]


@pytest.mark.parametrize(("does", "status"), WAYS)
@pytest.mark.parametrize("yields", [False, True])
def test_a_child_that_comes_out_of_the_handler_ends(
    serve: Serve, does: Callable[[], Any], status: int, yields: bool
) -> None:
    def forked(batch: list[int]) -> list[int]:
        child = os.fork()
        if child == 0:
            does()
            return batch
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] * len(batch)

    def in_parts(batch: list[int]) -> Iterator[list[int]]:
        yield forked(batch)

    made = handler("h")(in_parts) if yields else handler("h")(forked)
    ends = serve(made.handler).ask(1, 2)

    assert [told(end) for end in ends] == [status, status]
