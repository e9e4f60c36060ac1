"""How a side of a benchmark talks with it: lines of JSON, one in and one out.

The standard library alone, since some sides have an environment of their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answer_lines(make: Callable[[], Callable[[Any], Any]]) -> None:
    """Answer the lines on standard input, until it ends, with what was made at the start.

    The first line that goes out says that it has been made.
    """
    # Libraries say what they like on standard output; the results have it for themselves.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    answer = make()
    say({"ready": True})
    for line in sys.stdin:
        say(answer(json.loads(line)))
