"""A no-op job with its result stored, as the peer for `fleet.py`: `dramatiq tests.bench.dramatiq_noop`."""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

URL = os.environ["BENCH_REDIS_URL"]
broker = RedisBroker(url=URL)  # type: ignore[no-untyped-call]
broker.add_middleware(Results(backend=RedisBackend(url=URL)))  # type: ignore[no-untyped-call]
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True, queue_name="noop")
def echo(text: str) -> str:
    """Give the text back, which is what the scripted engine does."""
    return text
