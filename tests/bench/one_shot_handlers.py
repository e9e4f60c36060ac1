"""The two handlers that every system serves for `one_shot.py`, and how it is to serve them.

The standard library alone, since each peer has an environment of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from load import TEXT

ITEM = {"text": TEXT}
"""What each request carries, and its answer too."""
VARIABLE = "BENCH_SERVING"
SLEEP_S = 0.005
"""What a batch takes, however many are in it: a model that computes elsewhere."""


def noop(batch: list[Any]) -> list[Any]:
    """Give each item back."""
    return batch


def sleep(batch: list[Any]) -> list[Any]:
    """Give each item back, 5 ms later; the thread is held meanwhile, as a model holds it."""
    time.sleep(SLEEP_S)
    return batch


HANDLERS: dict[str, Callable[[list[Any]], list[Any]]] = {"noop": noop, "sleep": sleep}


@dataclass(frozen=True)
class Serving:
    """One server: on which port of this machine it serves which handler, with which batches."""

    handler: str
    port: int
    max_batch_size: int
    delay_ms: int

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def read(cls) -> Serving:
        """What `one_shot.py` asks for."""
        return cls(**json.loads(os.environ[VARIABLE]))

    @property
    def run(self) -> Callable[[list[Any]], list[Any]]:
        return HANDLERS[self.handler]
