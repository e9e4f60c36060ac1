"""A bulk job over a real fleet says what the client would have been told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from command import environment, streamfleet
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer import Client

LIMIT_S = 60.0


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_job_gives_the_answers_of_the_client(fleet: Client, fleet_url: str, tmp_path: Path) -> None:
    prompts = [f"word {number} and" for number in range(30)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, prompts)
    env = environment(STREAMFLEET_REDIS_URL=fleet_url)
    detached = await asyncio.to_thread(
        streamfleet, "bulk", "run", str(source), str(output), "--queue", fleet.queue, "--detach", env=env
    )
    assert detached.returncode == 0, detached.stderr
    worker = ("bulk", "worker", "--folder", str(tmp_path), "--burst")
    burst = await asyncio.to_thread(streamfleet, *worker, env=env, limit_s=LIMIT_S)
    assert burst.returncode == 0, burst.stderr
    told = read(output)
    requests = [GenerateRequest(prompt=prompt, max_tokens=8) for prompt in prompts]
    ends = await fleet.run_many(requests)
    assert told == {f"c{number}": [end.text, end.usage.completion_tokens] for number, end in enumerate(ends)}


def write(path: Path, prompts: list[str]) -> None:
    lines = [
        {"custom_id": f"c{number}", "request": {"kind": "generate", "prompt": prompt, "max_tokens": 8}}
        for number, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> dict[str, list[object]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        line["custom_id"]: [
            line["answer"]["choices"][0]["text"],
            line["answer"]["usage"]["completion_tokens"],
        ]
        for line in lines
    }
