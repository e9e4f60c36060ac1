"""A real browser without a window, driven over its own protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from itertools import count
from types import TracebackType
from typing import Any, Self

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 45.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--window-size=1200,900",
    "--remote-debugging-pipe",
)


class Browser:
    """One page: `open` a URL, `run` JavaScript in it, wait until something is so.

    `errors` are what the page complained of: exceptions, refused loads, calls of console.error.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session = ""

    async def __aenter__(self) -> Self:
        assert BINARY is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        down, self._down = os.pipe()
        up, ours = os.pipe()
        # The browser reads its commands from descriptor 3, and answers on 4.
        command = f'exec 3<&{down} 4>&{ours}; exec "$@"'
        self._process = await asyncio.create_subprocess_exec(
            *("bash", "-c", command, "bash", BINARY, *FLAGS, f"--user-data-dir={self._folder.name}"),
            pass_fds=(down, ours),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        os.close(down)
        os.close(ours)
        reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(up, "rb")
        )
        self._reading = asyncio.create_task(self._read(reader))
        target = (await self._ask("Target.createTarget", url="about:blank"))["targetId"]
        found = await self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self._ask(f"{domain}.enable")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading
        os.close(self._down)
        self._folder.cleanup()

    async def open(self, url: str) -> None:
        await self._ask("Page.navigate", url=url)
        await self.wait("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        said = await self._ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await self.run(f"Boolean({condition})"):  # noqa: ASYNC110 (a page has no event for it)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"{condition} did not come true; the page says:\n{text}") from None

    async def text(self, selector: str) -> str:
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def _ask(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        os.write(self._down, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(PATIENCE_S):
            return await answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    answer = self._answers.pop(message["id"])
                    if "error" in message:
                        answer.set_exception(AssertionError(message["error"]))
                    else:
                        answer.set_result(message["result"])
                else:
                    self._note(message["method"], message["params"])

    def _note(self, method: str, said: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(said["exceptionDetails"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.errors.append(said["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and said["type"] == "error":
            self.errors.append(json.dumps(said["args"]))
