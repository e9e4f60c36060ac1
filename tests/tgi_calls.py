"""Calls TGI's clients as they are told, in the environment of these; reads and writes JSON.

A call is `{"client", "url", "method", "arguments"}`, and its answer `{"value"}`, `{"values"}` of a stream,
and `{"raised", "message"}`, if it raised an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import huggingface_hub
import text_generation


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def _client(name: str, url: str) -> Any:
    if name.endswith("InferenceClient"):
        return getattr(huggingface_hub, name)(model=url, provider="hf-inference", timeout=60)
    return getattr(text_generation, name)(url, timeout=60)


def _call(call: dict[str, Any], said: dict[str, Any]) -> None:
    given = getattr(_client(call["client"], call["url"]), call["method"])(**call["arguments"])
    if inspect.isgenerator(given):
        said["values"] = []
        for value in given:
            said["values"].append(_plain(value))
    else:
        said["value"] = _plain(given)


async def _call_async(call: dict[str, Any], said: dict[str, Any]) -> None:
    given = getattr(_client(call["client"], call["url"]), call["method"])(**call["arguments"])
    if inspect.isawaitable(given):
        given = await given
    if isinstance(given, AsyncIterator):
        said["values"] = []
        async for value in given:
            said["values"].append(_plain(value))
    else:
        said["value"] = _plain(given)


def _said(call: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    try:
        if call["client"].startswith("Async"):
            asyncio.run(_call_async(call, said))
        else:
            _call(call, said)
    except Exception as error:  # noqa: BLE001 (which one is what the test asks)
        said |= {"raised": type(error).__name__, "message": str(error)}
    return said


if __name__ == "__main__":
    json.dump([_said(call) for call in json.load(sys.stdin)], sys.stdout)
