"""`module:function`, as it is written on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.handlers.loading import load

SOURCE = """\
from streamfleet_worker import handler

{more}

@handler("shout")
def shout(batch: list[str]) -> list[str]:
    return [text.upper() for text in batch]

class Group:
    whisper = handler("whisper")(lambda batch: [text.lower() for text in batch])

other = shout
number = 3

def plain(batch):
    return batch
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, from which modules are imported for as long as the test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def write(folder: Path, name: str, more: str = "") -> str:
    (folder / f"{name}.py").write_text(SOURCE.format(more=more))
    return name


def refused(path: str) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        load(path)
    return str(caught.value)


def test_a_handler_is_found_in_the_current_folder(folder: Path) -> None:
    name = write(folder, "speech_found")

    assert load(f"{name}:shout").name == "shout"
    assert load(f"{name}:Group.whisper").name == "whisper"
    # Other processes find it where it was found here, whatever the function calls itself.
    assert load(f"{name}:other").path == f"{name}:other"


def test_what_is_missing_is_named(folder: Path) -> None:
    name = write(folder, "speech_missing")

    for path in ("speech", "speech:", ":shout", ""):
        assert "write module:function" in refused(path)
    assert refused("speech_nowhere:shout").startswith(
        f"there is no module 'speech_nowhere', neither in {folder}"
    )
    assert "no module 'speech_nowhere'" in refused("speech_nowhere.inner:shout")
    assert refused("speech_nowhere:shout").endswith(
        "among what is installed: start it in the folder of that file"
    )
    assert f"{name} has no 'shuot'; the handlers there are other, shout" in refused(f"{name}:shuot")
    assert f"{name}:plain is no handler: write @handler(...) above it" in refused(f"{name}:plain")
    assert f"{name}:number is no handler" in refused(f"{name}:number")


def test_a_file_in_place_of_a_module_is_told_how_to_write_it(folder: Path) -> None:
    name = write(folder, "speech_file")
    (folder / "inner").mkdir()

    right = f"a file, and a module is wanted: write {name}:shout"
    assert refused(f"{name}.py:shout") == f"{name}.py is {right}"
    assert refused(f"./{name}.py:shout").endswith(f"a module is wanted: write {name}:shout")
    assert refused("inner/speech.py:shout").endswith("write speech:shout, and start it in the folder inner")
    assert refused("/there/speech:shout").endswith("write speech:shout, and start it in the folder /there")


def test_a_file_in_a_package_is_told_with_the_package(folder: Path) -> None:
    """Else what it imports relative to that could not be found."""
    (folder / "voices" / "loud").mkdir(parents=True)
    for file in ("voices/__init__.py", "voices/loud/__init__.py"):
        (folder / file).write_text("")

    assert refused("voices/loud/h.py:f").endswith("a module is wanted: write voices.loud.h:f")
    assert refused("voices/loud/__init__.py:f").endswith("a module is wanted: write voices.loud:f")
    assert refused(f"{folder}/voices/h:f").endswith(f"write voices.h:f, and start it in the folder {folder}")
    (folder / "voices" / "__init__.py").unlink()
    assert refused("voices/loud/h.py:f").endswith("write loud.h:f, and start it in the folder voices")


def test_a_folder_of_that_name_is_told_from_a_file(folder: Path) -> None:
    """Python makes a package of it, which has nothing in it."""
    (folder / "speech_folder").mkdir()

    words = refused("speech_folder:shout")
    assert words.startswith(
        f"speech_folder has no 'shout'; what was found is a folder of that name, {folder}/speech_folder, "
    )
    assert "start it in the folder of the file that is meant, or name a file in that folder" in words


def test_a_module_without_handlers_is_told_by_its_file(folder: Path) -> None:
    (folder / "speech_empty.py").write_text("")

    assert refused("speech_empty:shout").endswith(f"there is no handler in {folder}/speech_empty.py")
    assert refused("sys:shout").endswith("it is built into Python")


def test_a_module_that_cannot_be_imported_says_why(folder: Path) -> None:
    assert refused(f"{write(folder, 'speech_needs', 'import surely_not_there')}:shout").endswith(
        "ModuleNotFoundError: No module named 'surely_not_there' (at speech_needs.py:3)"
    )
    assert "SystemExit: 2" in refused(f"{write(folder, 'speech_exits', 'raise SystemExit(2)')}:shout")
    assert "SyntaxError" in refused(f"{write(folder, 'speech_odd', 'def')}:shout")
    # A fault of the decorator's own, with its words.
    more = '@handler("two")\ndef two(batch: list[str], model): ...'
    words = refused(f"{write(folder, 'speech_wrong', more)}:shout")
    assert "two takes model, and context= has no such name" in words
    assert words.endswith("(at speech_wrong.py:3)")


def test_serving_a_handler_takes_no_torch(tmp_path: Path) -> None:
    """Nor what else the extra `worker` does not bring; and importing its decorator alone takes less still."""
    write(tmp_path, "speech")
    program = """
import sys
import streamfleet_worker
assert not [name for name in sys.modules if name.startswith(("pydantic", "streamfleet_worker."))]
from streamfleet_worker import END, Retry, handler
wanted = {"structlog", "prometheus_client", "asyncio", "redis"}
assert not wanted & set(sys.modules), wanted & set(sys.modules)

import threading
import time
from streamfleet_common.one_shot import CallRequest
from streamfleet_worker.engine.base import Arrival
from streamfleet_worker.handlers.engine import handler_engine
from streamfleet_worker.handlers.loading import load

engine = handler_engine(load("speech:shout"), max_delay_s=0.0)
woken = threading.Event()
engine.listen(woken.set)
job = engine.prepare(CallRequest(handler="shout", input="hello"))
engine.add({("a", 1): Arrival(job, time.monotonic(), 1e12)})
while not (outputs := engine.step().outputs):
    assert woken.wait(60)
    woken.clear()
print(outputs[0].event.outputs)
engine.close()
heavy = {"torch", "transformers", "tokenizers", "numpy", "safetensors", "llguidance"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (answer.returncode, answer.stdout) == (0, "('HELLO',)\n"), answer.stderr
