"""Forks worker processes: each is as good as one that was started anew, and is there a second sooner.

A program. One JSON object a line on its standard input begins a worker: `env` is what its environment has
besides ours, `log` the file for what it says, `stop_at` where it is to end or to fall asleep by its own hand
(see `stopping_worker.py`), if anywhere, `exact` the class of workers that it says to be of. On standard
output it tells the `pid` of each in this order, and of each that has ended its `pid` and `status`. When its
input ends, so do all workers.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from functools import partial
from typing import Any

import delivery.stopping_worker as stopping
from streamfleet_common.settings import read
from streamfleet_worker import process
from streamfleet_worker.engine import scripted  # here, so that no worker has to
from streamfleet_worker.settings import WorkerSettings

REAP_S = 0.01
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main() -> None:
    wanted = b""
    alive: set[int] = set()
    while True:
        if select.select([0], [], [], REAP_S)[0]:
            received = os.read(0, 65536)
            if not received:
                break
            *lines, wanted = (wanted + received).split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line))
                alive.add(pid)
                _tell(pid=pid)
        while alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            alive.discard(pid)
            _tell(pid=pid, status=os.waitstatus_to_exitcode(status))
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["env"])
        if order["stop_at"]:
            stopping.arm(order["stop_at"])
        vars(scripted)["ScriptedEngine"] = partial(scripted.ScriptedEngine, exact=order["exact"])
        status = process.main(read(WorkerSettings))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _tell(**news: int) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
