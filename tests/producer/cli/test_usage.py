"""`streamfleet usage`: the ledger, as people and scripts read it."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from hand_worker import HandWorker
from streamfleet_common.schemas import GenerateRequest, Usage
from streamfleet_producer.cli.app import app
from streamfleet_producer.client import Client


async def use(url: str, queue: str, tenant: str, prompt: int, completion: int) -> None:
    """One request of a tenant, and what it took."""
    async with HandWorker(url, queue) as worker:
        await worker.announce()
        async with Client(url, queue, tenant=tenant) as fleet:
            running = asyncio.create_task(fleet.run(GenerateRequest(prompt="Hi")))
            (work,) = await worker.take()
            usage = Usage(prompt_tokens=prompt, completion_tokens=completion)
            assert await worker.finish(work, "x", usage=usage)
            await running


def called(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["usage", "--redis-url", url, *arguments])


@pytest.fixture
def ledger(redis_url: str) -> str:
    """Two queues and two tenants, and a day before today; gives today."""
    for queue, tenant, prompt, completion in (
        ("chat", "acme", 1000, 234),
        ("chat", "beta", 5, 6),
        ("embed", "acme", 70, 0),
    ):
        asyncio.run(use(redis_url, queue, tenant, prompt, completion))
    client: Any = redis.Redis
    with client.from_url(redis_url) as raw:
        today = datetime.fromtimestamp(raw.time()[0], UTC).date()
        before = today - timedelta(days=1)
        raw.hset(f"{{q:chat:0}}:usage:{before:%Y%m%d}", mapping={"acme|requests": 3, "acme|failed": 1})
    return today.isoformat()


def test_today_by_queue_and_tenant_and_in_all(redis_url: str, ledger: str) -> None:
    done = called(redis_url)
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["DAY", "QUEUE", "TENANT", "REQUESTS", "FAILED", "PROMPT", "COMPLETION", "TOKENS"],
        [ledger, "chat", "acme", "1", "0", "1,000", "234", "1,234"],
        [ledger, "chat", "beta", "1", "0", "5", "6", "11"],
        [ledger, "embed", "acme", "1", "0", "70", "0", "70"],
        ["all", "3", "0", "1,075", "240", "1,315"],
    ]


def test_one_tenant_and_one_queue_since_a_day(redis_url: str, ledger: str) -> None:
    before = (datetime.fromisoformat(ledger) - timedelta(days=1)).date().isoformat()
    done = called(redis_url, "--queue", "chat", "--tenant", "acme", "--since", before, "--json")
    assert json.loads(done.stdout) == [
        {
            "day": before,
            "queue": "chat",
            "tenant": "acme",
            "requests": 3,
            "failed": 1,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "tokens": 0,
        },
        {
            "day": ledger,
            "queue": "chat",
            "tenant": "acme",
            "requests": 1,
            "failed": 0,
            "prompt_tokens": 1000,
            "completion_tokens": 234,
            "tokens": 1234,
        },
    ]
    # A single line is its own sum.
    assert len(called(redis_url, "--queue", "embed").stdout.splitlines()) == 2


def test_nothing_to_show(redis_url: str) -> None:
    done = called(redis_url)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "nothing was used\n")
    assert called(redis_url, "--json").stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--queue", "nowhere"), 5, "no queue 'nowhere'"),
        (("--tenant", "a b"), 2, "names no tenant"),
        (("--since", "2001-01-01"), 2, "usage is kept for 400 days"),
        (("--since", "yesterday"), 2, "yesterday"),
    ],
    ids=str,
)
def test_what_cannot_be_shown(
    redis_url: str, ledger: str, arguments: tuple[str, ...], status: int, words: str
) -> None:
    del ledger
    done = called(redis_url, *arguments)
    assert done.exit_code == status
    assert words in done.stderr
