"""A process of a handler's pool: `python -m streamfleet_worker.handlers.pool_process module:function FD`.

It builds the handler's context objects, says that it is ready, and runs what comes, batch by batch.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
from typing import Any

from streamfleet_common.errors import StreamfleetError
from streamfleet_worker.engine.item import ItemBatch, Progress
from streamfleet_worker.handlers.call_input import CallInput
from streamfleet_worker.handlers.handler_runner import HandlerRunner
from streamfleet_worker.handlers.loading import load
from streamfleet_worker.handlers.pipe import Pipe
from streamfleet_worker.handlers.report import to_report

PR_SET_PDEATHSIG = 1
"""Of Linux' prctl."""


class PoolProcess:
    """The other end of a `PoolMember`'s pipe."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._orders: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._unwanted = -1
        """Number of the last batch that nobody wants the rest of."""

    def run(self, path: str) -> int:
        """Serve until the pipe ends; gives the exit status."""
        threading.Thread(target=self._listen, name="pool-listen", daemon=True).start()
        try:
            handler = load(path)
            runner = HandlerRunner(handler)
        except StreamfleetError as error:
            self._pipe.send(["broken", to_report(error)])
            return 1
        self._pipe.send(["ready"])
        while (order := self._orders.get()) is not None:
            number, texts, again = order
            try:
                values = [CallInput(text, handler.signature.input, was_given=again) for text in texts]
                self._serve(runner, number, values)
            except Exception as error:  # noqa: BLE001  the batch as a whole has failed
                self._pipe.send(["failed", number, to_report(error)])
        runner.close()
        return 0

    def _serve(self, runner: HandlerRunner, number: int, values: list[CallInput]) -> None:
        running = runner.launch(ItemBatch(values))
        device_s = 0.0
        while True:
            progress = running.advance()
            device_s += progress.device_s
            if not progress.ended and self._unwanted >= number:
                running.close()
                progress = Progress([None] * len(values))
            if progress.ended or any(outcome is not None for outcome in progress.outcomes):
                reports = [to_report(outcome) for outcome in progress.outcomes]
                self._pipe.send(["news", number, reports, progress.ended, device_s])
                device_s = 0.0
            if progress.ended:
                return

    # --- on a thread of its own

    def _listen(self) -> None:
        try:
            while True:
                match self._pipe.receive():
                    case ["run", number, texts, again]:
                        self._orders.put([number, texts, again])
                    case ["close", number]:
                        self._unwanted = number
                    case ["stop"]:
                        self._orders.put(None)
        except (EOFError, OSError):
            # The worker is gone, and with it everybody who waits for what is computed here.
            os._exit(0)


def main() -> int:
    """Run the process that the command line asks for."""
    path, fd = sys.argv[1:]
    # A Ctrl-C is for the worker, which ends its processes when it has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # The listening thread does not run while a handler holds the interpreter. Who started us is the
        # thread that keeps us, which lives as long as we do.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return PoolProcess(Pipe(socket.socket(fileno=int(fd)))).run(path)


if __name__ == "__main__":
    sys.exit(main())
