"""How Python itself runs a worker, where its defaults are for other programs."""

from __future__ import annotations

import gc
import sys

SWITCH_S = 0.0002
"""How long a thread may keep the interpreter while another wants it. A few threads take turns here, each
with little to do at a time: with Python's 5 ms the engine would wait for the event loop as long as a batch
takes."""
YOUNG = 20_000
"""New objects before Python looks for rings among them: a batch of requests has thousands, and none."""


def tune() -> None:
    """Let threads take turns quickly, and look for garbage less often."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(YOUNG, 20, 100)


def settle() -> None:
    """Take what there is now, libraries and a model, for what will stay, and never look through it again."""
    gc.collect()
    gc.freeze()
