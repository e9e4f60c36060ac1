"""What the gateway tells of queues and workers."""

from __future__ import annotations

import httpx

from gateway_process import Gateway
from hand_worker import HandWorker
from streamfleet_producer import Client, GenerateRequest


async def test_queues_and_workers_are_told(redis_url: str) -> None:
    async with (
        HandWorker(redis_url) as worker,
        HandWorker(redis_url, "other", "w2") as other,
        Client(redis_url, queue="q") as client,
        Gateway(redis_url) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        assert (await http.get("/v1/fleet")).json() == {"queues": []}
        await worker.announce(max_queue_depth=7)
        await other.announce(tasks=("embed",), model="vectors")
        for _ in range(3):
            await client.submit(GenerateRequest(prompt="hello"))
        await worker.take(1)
        await gateway.services.directory.refresh()
        answer = await http.get("/v1/fleet")
        assert answer.status_code == 200
        first, second = answer.json()["queues"]
    assert (first["queue"], first["queued"], first["running"], first["limit"]) == ("other", 0, 0, 1000)
    assert first["workers"][0]["tasks"] == ["embed"]
    assert (second["queue"], second["queued"], second["running"], second["limit"]) == ("q", 2, 1, 7)
    assert 0 <= second["oldest_wait_ms"] < 60_000
    (card,) = second["workers"]
    assert (card["worker"], card["model"], card["state"], card["streams"]) == ("w1", "m", "ready", False)
    assert card["limits"]["max_seq_len"] == 1000
