"""dramatiq for `fleet.py`: results in Redis, fetched by a blocking command.

Set to its best: a worker that polls every millisecond rather than up to every second, four threads (one, two
and eight were slower: Python's lock), and 256 messages prefetched.
"""

from __future__ import annotations

import json
import os
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from load import TEXT, Load, measure_blocking

URL = os.environ["BENCH_URL"]
broker = RedisBroker(url=URL)
broker.add_middleware(Results(backend=RedisBackend(url=URL)))
dramatiq.set_broker(broker)


def _echo(text: str) -> str:
    return text


echo: Any = dramatiq.actor(store_results=True, queue_name="noop", actor_name="echo")(_echo)

if __name__ == "__main__":
    result = measure_blocking(
        Load.read(),
        lambda: echo.send(TEXT),
        lambda message: message.get_result(block=True, timeout=30_000),
    )
    print(json.dumps(result))
