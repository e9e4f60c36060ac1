"""What a service's type checker sees of us: mypy as it comes, without pydantic's plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GOOD = """\
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest, QueueFull, TooLong
from streamfleet_producer import ChatMessage, Client, GenerateRequest, Sampling


async def ask(fleet: Client, turns: list[ChatMessage], ids: list[int]) -> str:
    chat = GenerateRequest(messages=turns, stop=["END"], sampling=Sampling(temperature=0.5, seed=3))
    await fleet.run(GenerateRequest(prompt_token_ids=ids, stop_token_ids=[2], max_tokens=8), timeout=30)
    try:
        answer = await fleet.run(chat)
    except QueueFull as error:
        wait: float = error.retry_after
        return f"again in {wait} s"
    except TooLong as error:
        return str(error.limit - error.max_tokens - error.prompt_tokens)
    except InvalidRequest as error:
        return ", ".join(error.problems)
    return answer.text
"""

BAD = """\
from streamfleet_producer import ChatMessage, GenerateRequest, Sampling

GenerateRequest(prompt="x", maxtokens=5)
GenerateRequest(prompt="x", max_tokens="5")
GenerateRequest(prompt="x", stop=[1])
ChatMessage(role="boss", content="x")
Sampling(temperature="hot")
"""


@pytest.mark.slow
def test_a_service_gets_its_requests_checked_by_plain_mypy(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    sources = os.pathsep.join(str(ROOT / part) for part in ("common", "producer"))
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "good.py", "bad.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.partition(": error: ")[0] for line in answer.stdout.splitlines() if ": error: " in line]
    assert found == [f"bad.py:{line}" for line in range(3, 8)], answer.stdout + answer.stderr
