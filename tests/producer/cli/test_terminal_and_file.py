"""Results in a file while somebody watches: all of them are there, and none on the terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from command import LIMIT_S, PROGRAM, environment
from played_worker import played
from streamfleet_common.one_shot import Classification, Embedding, Label

COUNT = 100  # several blocks: the bar begins with the first one


def answer(request: Any) -> dict[str, Any]:
    if request.kind == "embed":
        return {"embeddings": (Embedding(data=bytes(4)),) * request.n}
    if request.kind == "classify":
        found = Classification(labels=(Label(label="calm", score=1.0),))
        return {"classifications": (found,) * request.n}
    return {"outputs": (request.input,)}


def run_on_a_terminal(arguments: list[str], env: dict[str, str], stdout: Path) -> tuple[int, str]:
    """Run a command whose stderr is a terminal and whose stdout is a file; gives what the terminal shows."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def look() -> None:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # nobody has the other end any more
                return
            shown.append(data)

    looking = threading.Thread(target=look)
    try:
        with stdout.open("wb") as file:
            command = subprocess.Popen(
                [*PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=theirs, env=env
            )
        looking.start()
        status = command.wait(LIMIT_S)
    finally:
        os.close(theirs)
        if looking.ident is not None:
            looking.join(LIMIT_S)
        os.close(ours)
    return status, b"".join(shown).decode()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["embed", "in.jsonl", "--text"], "embedding"),
        (["classify", "in.jsonl", "--text"], "labels"),
        (["call", "any", "--file", "in.jsonl"], "output"),
    ],
)
def test_results_go_into_the_file_alone(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], field: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(f"{number}\n" for number in range(COUNT)))
    env = environment(STREAMFLEET_REDIS_URL=redis_url, STREAMFLEET_QUEUE="q", TERM="xterm", COLUMNS="100")
    with played(redis_url, answer, model="any", tasks=["embed", "classify", "call"]):
        status, shown = run_on_a_terminal(arguments, env, Path("out.jsonl"))
    assert status == 0, shown
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [int(line.get("text", line.get("output"))) for line in found] == list(range(COUNT))
    assert f"/{COUNT}" in shown  # the bar was there
    assert field not in shown
