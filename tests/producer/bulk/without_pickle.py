"""A process that dies of pickle: it works off RQ's queue, and what its cron puts there.

    STREAMFLEET_REDIS_URL=… python without_pickle.py

Nothing but the tests runs it.
"""

from __future__ import annotations

import _pickle
import os
import pickle
import sys
from typing import Any, NoReturn

STATUS = 86


def die(*_: Any, **__: Any) -> NoReturn:
    # No exception: somebody may catch it.
    os.write(2, b"pickle was used\n")
    os._exit(STATUS)


def forbid() -> None:
    """End the process where anything is pickled or unpickled; before RQ is imported, which keeps these."""
    for module in (pickle, _pickle):
        for name in ("dump", "dumps", "load", "loads"):
            setattr(module, name, die)
        for name in ("Pickler", "Unpickler"):
            setattr(module, name, type(name, (getattr(module, name),), {"__init__": die}))


if __name__ == "__main__":
    forbid()
    if sys.argv[1:] == ["probe"]:  # that the trap works
        pickle.dumps(1)
    from streamfleet_producer.bulk.connection import connect
    from streamfleet_producer.bulk.plan import Plan
    from streamfleet_producer.bulk.schedule import JsonCron
    from streamfleet_producer.bulk.settings import settings
    from streamfleet_producer.bulk.worker import serve

    told = settings()
    cron = JsonCron(connect(told.jobs_url), told.rq_queue, Plan(replay_queues=("q",)))
    cron.register_birth()
    cron.enqueue_jobs()
    cron.enqueue_jobs()
    cron.save()
    serve(told, burst=True)
