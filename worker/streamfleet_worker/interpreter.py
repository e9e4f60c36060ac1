"""How Python itself runs a worker, where its defaults are for other programs."""

from __future__ import annotations

import gc
import os
import signal

YOUNG = 20_000
"""New objects before Python looks for rings among them: a batch of requests has thousands, and none."""


def settle() -> None:
    """Take what there is now, libraries and a model, for what will stay: never look through it for garbage.

    A look takes as long as a batch, and the slowest requests were those that met one: the 99th percentile of
    256 calls in flight was 41 ms with Python's own ways, and is 33 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 100)


def disown_forks() -> None:
    """Let a process that a model's or a handler's code forks have signals of its own.

    It has the event loop's otherwise, and the pipe by which that hears of them: a SIGTERM for a process of a
    `multiprocessing.Pool` would not end it, and would have this worker drain.
    """
    os.register_at_fork(after_in_child=_take_signals)


def _take_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
