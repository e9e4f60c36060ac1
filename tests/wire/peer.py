"""A client or a worker that speaks another version of the protocol, as a process of its own.

A program: `peer.py client|worker VERSION URL`. Of a version above ours, every message has a field more, at
each level that is known to be a map of fields. A worker says `ready`, and ends with its standard input; a
client says what became of its requests, as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from streamfleet_common import codec

OURS = codec.VERSION
NOVELTY = {"novelty": {"of": [1, 2.5, "three"]}}


def speak(version: int) -> None:
    """Let all messages of this process be of this version."""
    codec.VERSION = version
    if version > OURS:
        for name in ("_fields", "_dump"):
            setattr(codec, name, _with_novelty(name))
        unpack = codec.unpack
        # It knows its own fields.
        codec.unpack = lambda *arguments: _without_novelty(unpack(*arguments))


def _with_novelty(name: str) -> Callable[[Any], Any]:
    real = getattr(codec, name)
    if name == "_fields":
        return lambda message: {**real(message), **NOVELTY}
    return lambda kind: lambda message: {**real(kind)(message), **NOVELTY}


def _without_novelty(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_novelty(one) for name, one in value.items() if name not in NOVELTY}
    return tuple(map(_without_novelty, value)) if isinstance(value, tuple) else value


async def client(url: str) -> dict[str, Any]:
    # Only now: what is encoded while a module is imported has the version of that moment.
    from streamfleet_producer import Client, GenerateRequest, StreamfleetError  # noqa: PLC0415

    told: dict[str, Any] = {}
    async with Client(url, "q", silence_s=60) as fleet:
        told["models"] = [card.model for card in await fleet.models()]
        ticket = await fleet.submit(GenerateRequest(prompt="ECHO 2"))
        told["id"] = ticket.id
        try:
            told["result"] = (await fleet.result(ticket.id, timeout=60)).text
            async with fleet.stream(GenerateRequest(prompt="ECHO 3", logprobs=True)) as tokens:
                told["text"] = "".join([delta.text async for delta in tokens])
                told["usage"] = tokens.result.usage.completion_tokens
            waiting = await fleet.submit(GenerateRequest(prompt="ECHO 100 TICK 1000"))
            told["cancel"] = await fleet.cancel(waiting.id)
            told["status"] = (await fleet.status(waiting.id)).state
        except StreamfleetError as error:
            told["error"] = [type(error).__name__, str(error)]
    return told


async def worker(url: str) -> None:
    from gated_engine import GatedEngine  # noqa: PLC0415
    from hired import Hired  # noqa: PLC0415

    hired = await Hired(url, "other", GatedEngine(model="m")).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await hired.dismiss()


if __name__ == "__main__":
    role, version, url = sys.argv[1:]
    speak(int(version))
    if role == "client":
        sys.stdout.write(json.dumps(asyncio.run(client(url))))
    else:
        asyncio.run(worker(url))
