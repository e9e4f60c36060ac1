"""What the log says of errors in somebody's code: where in that code, once, and no value."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from served_handler import ServedHandler
from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.handlers.loading import load

Serve = Callable[..., ServedHandler]

SOURCE = """\
import asyncio
import json
from collections.abc import Iterator
from pydantic import BaseModel, field_serializer
from rt_help import first
from streamfleet_worker import handler

class Item(BaseModel):
    text: str

class Out(BaseModel):
    text: str

    @field_serializer("text")
    def write(self, text):
        return text.secret()

def bug(batch: list[Item]) -> list[str]:
    return [item.txet for item in batch]

def library(batch: list[Item]) -> list[str]:
    return [json.loads(item.text) for item in batch]

def helper(batch: list[Item]) -> list[str]:
    return [first(item.text) for item in batch]

async def tasks(batch: list[Item]) -> list[str]:
    async def one(item):
        return item.txet

    async with asyncio.TaskGroup() as group:
        return [await group.create_task(one(item)) for item in batch]

def steps(batch: list[Item]) -> Iterator[list[str]]:
    yield batch[0].txet

def caught(batch: list[Item]) -> list[str | Exception]:
    try:
        return [batch[0].txet]
    except AttributeError as error:
        return [error]

def memory(batch: list[Item]) -> list[str]:
    if "large" in [item.text for item in batch]:
        raise MemoryError
    return [item.text for item in batch]

def output(batch: list[Item]) -> list[Out]:
    return [Out(text=item.text) for item in batch]

def collated(batch) -> list[str]:
    return batch

def stack(inputs: list[Item]):
    return [item.txet for item in inputs]

def load_model():
    return json.loads("{")

def with_model(batch: list[Item], model) -> list[str]:
    return []

made = {
    function.__name__: handler(function.__name__)(function)
    for function in (bug, library, helper, tasks, steps, caught, memory, output)
}
handler("collated", collate=stack)(collated)
handler("with_model", context={"model": load_model})(with_model)
"""
HELP = """\
def first(text):
    return text[1000]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """The current folder, with a module `rt` full of handlers that fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "rt.py").write_text(SOURCE)
    (tmp_path / "rt_help.py").write_text(HELP)
    caplog.set_level(logging.DEBUG, "streamfleet_worker")
    return tmp_path


def said(caplog: pytest.LogCaptureFixture, level: int, logger: str = "") -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name.startswith(f"streamfleet_worker.{logger}")
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bug", "AttributeError at rt.py:19 in bug"),
        ("library", "JSONDecodeError at rt.py:22 in library"),
        ("helper", "IndexError at rt_help.py:2 in first, called at rt.py:25 in helper"),
        ("tasks", "ExceptionGroup at rt.py:29 in one"),
        ("steps", "AttributeError at rt.py:35 in steps"),
        ("output", "AttributeError at rt.py:16 in Out.write"),
        ("collated", "AttributeError at rt.py:55 in stack"),
    ],
)
def test_the_place_is_the_last_one_in_the_users_own_code(
    serve: Serve, folder: Path, caplog: pytest.LogCaptureFixture, name: str, words: str
) -> None:
    served = serve(load(f"rt:{name}"))

    ends = served.ask({"text": "secret"}, {"text": "secret"})

    assert [end.state for end in ends] == ["failed", "failed"]
    assert said(caplog, logging.WARNING, "handlers") == [f"handler {name!r} raised {words}"]
    assert "secret" not in caplog.text


def test_the_engine_names_no_file_of_ours(
    serve: Serve, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(load("rt:bug")).ask({"text": "secret"})

    assert said(caplog, logging.WARNING, "engine") == [
        "request call-0 epoch 1 failed on item 0: AttributeError"
    ]


def test_one_that_was_caught_and_given_is_told_too(
    serve: Serve, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(load("rt:caught")).ask({"text": "secret"})

    assert said(caplog, logging.INFO) == ["handler 'caught' raised AttributeError at rt.py:39 in caught"]


def test_a_batch_that_is_halved_is_told_once(
    serve: Serve, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = serve(load("rt:library")).ask(*({"text": text} for text in ["1", "2", "secret", *"34567"]))

    assert [end.state for end in ends].count("failed") == 8  # numbers are no texts, and the other no JSON
    assert said(caplog, logging.WARNING, "handlers") == [
        "handler 'library' raised JSONDecodeError at rt.py:22 in library"
    ]
    # 8, 4, 2 and 1 have failed; the first is told of.
    assert said(caplog, logging.DEBUG, "handlers") == said(caplog, logging.WARNING, "handlers") * 3
    assert [one for one in said(caplog, logging.WARNING, "engine") if "halves" in one] == []
    assert len([one for one in said(caplog, logging.DEBUG, "engine") if "halves" in one]) == 3


def test_a_lack_of_memory_is_told_once_too(
    serve: Serve, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(load("rt:memory")).ask(*({"text": text} for text in ["a", "b", "large", "c"]))

    assert [one for one in said(caplog, logging.WARNING, "engine") if "halves" in one] == [
        f"a batch of 4 failed, and is tried in halves: MemoryError at {folder}/rt.py:45"
    ]
    assert len(said(caplog, logging.WARNING, "handlers")) == 1


def test_a_context_that_fails_leaves_its_traceback(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelLoadFailed, match=r"JSONDecodeError: .*\(at rt.py:58 in load_model\)$"):
        ServedHandler(load("rt:with_model"))

    (words,) = said(caplog, logging.ERROR)
    first, *places = words.split("\n  ")
    assert first == "context 'model' of handler 'with_model' raised JSONDecodeError:"
    assert places[0] == "rt.py:58 in load_model"
    assert [place.partition(" in ")[2] for place in places[1:]] == [
        "loads",
        "JSONDecoder.decode",
        "JSONDecoder.raw_decode",
    ]


def test_a_module_that_fails_leaves_its_traceback(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "rt_outer.py").write_text("import json\nimport rt_inner\n")
    (folder / "rt_inner.py").write_text("\n\ndef read():\n    return [][1]\n\nread()\n")

    with pytest.raises(ModelLoadFailed, match=r"IndexError: .* \(at rt_inner.py:4 in read\)$"):
        load("rt_outer:predict")

    (words,) = said(caplog, logging.ERROR)
    assert words.split("\n  ") == [
        "rt_outer raised IndexError when it was imported:",
        "rt_outer.py:2",
        "rt_inner.py:6",
        "rt_inner.py:4 in read",
    ]
