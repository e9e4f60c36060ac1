"""celery for `fleet.py`, with Redis as broker and result backend.

Set to its best: the solo pool (a thread pool of one or eight is slower), msgpack, 256 messages prefetched, no
gossip, no mingle, no heartbeats, no events, a log of errors alone. Results are pushed.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

from load import TEXT, Load, measure_blocking

URL = os.environ["BENCH_URL"]
app: Any = Celery("noop", broker=URL, backend=URL)
app.conf.update(
    task_serializer="msgpack",
    result_serializer="msgpack",
    accept_content=["msgpack"],
    worker_prefetch_multiplier=256,
    worker_send_task_events=False,
    worker_enable_remote_control=False,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    result_expires=600,
)


def _echo(text: str) -> str:
    return text


echo: Any = app.task(name="echo")(_echo)

if __name__ == "__main__":
    result = measure_blocking(
        Load.read(),
        lambda: echo.apply_async((TEXT,)),
        lambda sent: sent.get(timeout=30),
    )
    print(json.dumps(result))
