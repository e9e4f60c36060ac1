"""Workers as real processes, which may be killed, paused and drained, and are replaced when they end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

COMMAND = (sys.executable, "-P", "-m", "streamfleet_worker")
READY_LIMIT_S = 60.0
END_LIMIT_S = 60.0
POLL_S = 0.02
REPLACED_AFTER_S = 0.2
LINES_KEPT = 200
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ChaosWorker:
    """One `python -m streamfleet_worker` with the scripted engine.

    `settings` are the worker's, by field name; `url` is where it finds Redis. `log` is a file that its lines
    are added to. To be made on the program's first thread: with that it ends, even if it is paused then (on
    Linux).
    """

    def __init__(self, url: str, settings: Mapping[str, object], log: Path | None = None) -> None:
        self.url = url
        ours = {f"STREAMFLEET_{name.upper()}": str(value) for name, value in settings.items()}
        ours["STREAMFLEET_REDIS_URL"] = url
        theirs = {name: value for name, value in os.environ.items() if not name.startswith("STREAMFLEET_")}
        self.name = ""
        """What it is called as an owner, once it has said so."""
        self.is_paused = False
        self.told_to_end = False
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        env = {**theirs, "STREAMFLEET_ENGINE": "scripted", **ours, "STREAMFLEET_LOG_FORMAT": "json"}
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**env, "PYTHONUNBUFFERED": "1"},
            preexec_fn=_die_with_parent if _LIBC else None,  # noqa: PLW1509 (one call, no lock)
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name="worker-log", daemon=True)
        self._reader.start()

    async def ready(self) -> None:
        """Wait until it serves its queue; fails if it ends before that."""
        async with asyncio.timeout(READY_LIMIT_S):
            while not self._ready.is_set():
                if self.status is not None:
                    raise AssertionError(f"a worker ended while starting: {self.lines()[-5:]}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ready.wait(), POLL_S)

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def status(self) -> int | None:
        """Its exit status, minus n for a death by signal n; None while it runs."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """The end of its log."""
        return list(self._lines)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        self.is_paused = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.is_paused = False
        self._signal(signal.SIGCONT)

    def drain(self) -> None:
        self.told_to_end = True
        self._signal(signal.SIGTERM)

    async def ended(self, limit_s: float = END_LIMIT_S) -> int:
        """Wait for its end; gives its exit status."""
        async with asyncio.timeout(limit_s):
            while (status := self.status) is None:  # noqa: ASYNC110 (a process has no event for us)
                await asyncio.sleep(POLL_S)
        return status

    def close(self) -> None:
        """End it now, whatever it does."""
        self.kill()
        self._process.wait()
        self._reader.join()

    def _signal(self, number: signal.Signals) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    # --- on a thread of its own

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for raw in pipe:
                self._follow(raw.decode(errors="replace").rstrip())

    def _follow(self, line: str) -> None:
        self._lines.append(line)
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(line + "\n")
        try:
            record = json.loads(line)
        except ValueError:
            return
        if isinstance(record, dict) and "worker" in record:
            self.name = record["worker"]
            if record.get("event") == "ready":
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._ready.set)


def _die_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


class Crew:
    """As many workers as there are `urls`, each on its own; whoever ends is replaced.

    `on_end` is called with each worker that has ended, before its successor starts.
    """

    def __init__(
        self,
        urls: list[str],
        settings: Mapping[str, object],
        on_end: Callable[[ChaosWorker], Awaitable[None]],
        log: Path | None = None,
    ) -> None:
        self._urls = urls
        self._settings = settings
        self._on_end = on_end
        self._log = log
        self._posts: list[ChaosWorker] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._is_closing = False
        self.replaced = 0

    async def __aenter__(self) -> Crew:
        self._posts = [self._start(url) for url in self._urls]
        try:
            for worker in self._posts:
                await worker.ready()
        except BaseException:
            self._close_all()
            raise
        self._keeping = [asyncio.create_task(self._keep(post)) for post in range(len(self._urls))]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closing = True
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self._close_all()

    @property
    def workers(self) -> list[ChaosWorker]:
        """Those that serve now; paused ones among them."""
        return [worker for worker in self._posts if worker.is_ready and worker.status is None]

    def behind(self, url: str) -> list[ChaosWorker]:
        """Those of them that reach Redis under this URL."""
        return [worker for worker in self.workers if worker.url == url]

    async def drained(self) -> None:
        """Let all end in order, and replace nobody any more."""
        self._is_closing = True
        for worker in self._posts:
            worker.resume()
            worker.drain()
        async with asyncio.timeout(END_LIMIT_S):
            await asyncio.gather(*self._keeping)

    def _start(self, url: str) -> ChaosWorker:
        return ChaosWorker(url, self._settings, self._log)

    def _close_all(self) -> None:
        for worker in self._posts:
            worker.close()

    async def _keep(self, post: int) -> None:
        while True:
            worker = self._posts[post]
            while worker.status is None:  # noqa: ASYNC110 (a process has no event for us)
                await asyncio.sleep(POLL_S)
            await self._on_end(worker)
            if not self._is_closing:
                await asyncio.sleep(REPLACED_AFTER_S)
            if self._is_closing:
                return
            self.replaced += 1
            self._posts[post] = self._start(self._urls[post])
