"""Each role does its whole job as a user with the rights of its role, and the server refuses it nothing."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker_parts import CARD, begin_waiting, retry, submission
from command import environment, streamfleet
from deploy.guarded import TENANT, Guarded
from gated_engine import GatedEngine
from gateway_process import Gateway
from hand_worker import HandWorker
from hired import Hired
from streamfleet_common import acl, codec
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Bill
from streamfleet_common.schemas import GenerateRequest
from streamfleet_common.scripts import Script, ScriptName
from streamfleet_common.settings import Durability
from streamfleet_common.shares import Share
from streamfleet_producer.bulk.batches import Batches
from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.bulk.upkeep import Upkeep
from streamfleet_producer.client import Client
from streamfleet_producer.gateway.key_file import KeyEntry, KeyFile, hash_of, new_key, new_tenant
from streamfleet_producer.operations import control, lanes
from streamfleet_producer.operations.doctor import examine
from streamfleet_producer.operations.operator_broker import OperatorBroker

REQUEST = GenerateRequest(prompt="a b c", max_tokens=8)
CALLED_BY: dict[acl.Role, tuple[ScriptName, ...]] = {
    "producer": ("submit", "cancel"),
    "gateway": ("submit", "cancel", "sweep", "backlog"),
    "worker": ("start", "renew", "emit", "finish", "release", "handback", "sweep", "announce"),
    "bulk": ("submit", "cancel", "sweep"),
    "operator": ("submit", "cancel", "move", "backlog"),
    "metrics": (),
}

CALL = re.compile(r"\bp?call\('(XGROUP|XINFO)', '([A-Z]+)'|\bp?call\('(?!XGROUP|XINFO)([A-Z]+)'")
"""A command in a script, and where it has one its subcommand."""


# --- what scripts do, whatever way they take


@pytest.mark.parametrize("role", acl.ROLES)
def test_a_role_has_every_command_of_its_scripts(role: acl.Role) -> None:
    granted = set(re.findall(r" \+(\S+)", acl.user("u", role)))
    for name in CALLED_BY[role]:
        text = Script.load(name).text
        called = re.findall(
            r"\bp?call\('(XGROUP|XINFO)', '([A-Z]+)'|\bp?call\('(?!XGROUP|XINFO)([A-Z]+)'", text
        )
        assert len(called) == len(re.findall(r"\bp?call\(", text)), "one is not written out"
        wanted = {"|".join(filter(None, words)).lower() for words in called}
        assert wanted <= granted, name


def test_every_script_belongs_to_a_role() -> None:
    folder = files("streamfleet_common") / "lua"
    there = {Path(str(path)).stem for path in folder.iterdir() if str(path).endswith(".lua")}
    called = {str(name) for names in CALLED_BY.values() for name in names}
    assert there - {"record", "recovery"} == called


# --- jobs


async def working(url: str) -> Hired:
    return await Hired(url, "w0", GatedEngine()).start()


@pytest.mark.parametrize("producer", ["producer", TENANT])
async def test_producer(guarded: Guarded, producer: str) -> None:
    hired = await working(guarded.url("worker"))
    async with Client(guarded.url(producer), "q", tenant=TENANT) as fleet:
        assert await fleet.queues() == ["q"]
        assert [card.worker for card in await fleet.models()] == ["w0"]
        answer = await fleet.run(REQUEST)
        assert answer.text == "a b c"
        async with fleet.stream(REQUEST) as tokens:
            text = "".join([event.text async for event in tokens])
        assert text == "a b c"
        ticket = await fleet.submit(REQUEST, idempotency_key="k")
        assert (await fleet.submit(REQUEST, idempotency_key="k")).id == ticket.id
        assert (await fleet.result(ticket.id)).text == "a b c"
        assert len(await fleet.run_many([REQUEST, REQUEST])) == 2
        hired.engine.is_open = False
        open_ = await fleet.submit(REQUEST, stream=True)
        assert (await fleet.status(open_.id)).state in ("queued", "running")
        async with fleet.attach(open_.id) as again:
            hired.engine.is_open = True
            assert "".join([event.text async for event in again]) == "a b c"
        hired.engine.is_open = False
        unwanted = await fleet.submit(REQUEST)
        assert await fleet.cancel(unwanted.id) == "cancelled"
    await hired.dismiss()
    # Its share of the sweeps is left to the workers.
    assert set(guarded.refusals()) <= {(producer, "zrangebyscore")}


@pytest.mark.parametrize("level", ["safe", "replicated"])
@pytest.mark.parametrize("role", ["producer", "gateway", "bulk", "operator"])
async def test_durability(guarded: Guarded, role: str, level: Durability) -> None:
    connections = Connections.open(guarded.url(role))
    broker = Broker(connections, "q", durability=level)
    if guarded.raw.info("server")["redis_version"] >= "7.2" and level == "safe":
        (submitted,) = await broker.submit([submission()])
        assert submitted.outcome == "accepted"
    await connections.close()
    assert guarded.refusals() == []


async def test_worker(guarded: Guarded) -> None:
    connections = Connections.open(guarded.url("worker"))
    worker = Broker(connections, "q")
    raw = Connections.open(guarded.node.url)
    anybody = Broker(raw, "q")
    async with HandWorker(guarded.url("worker")) as hand:
        assert await worker.announce_queue()
        await worker.withdraw_queue()
        await hand.broker.announce(CARD, sub_lanes=3)
        await worker.create_groups()
        await anybody.submit([submission(tenant=f"t{number}", stream=True) for number in range(6)])
        deliveries = await begin_waiting(worker)
        assert len(deliveries) == 6
        await worker.renew("w1", deliveries)
        # Cancelled and charged, tried again at once and later, given back, lost until dead, expired, stray.
        assert await worker.finish([retry(deliveries[0], after_ms=1), retry(deliveries[1])]) == [True, True]
        assert await worker.release(deliveries[2:4]) == [True, True]
        entry = deliveries[4].entry
        await anybody.cancel([entry.rid], codec.decode_envelope(entry.payload).tenant)
        await worker.finish([], [Bill(entry.rid, deliveries[4].fence, 3, 4)])
        assert sum(one.tokens for one in await anybody.usage()) == 7
        await worker.hand_back("w1", crashed=True)
        guarded.raw.xadd("{q:q:0}:s:normal", {"r": "0" * 34, "p": "no record"})
        await anybody.submit([submission(deadline_ms=1)])
        while await begin_waiting(worker):
            await worker.hand_back("w1", crashed=True)
            await worker.sweep()
        await worker.given("w1")
        await worker.create_groups()
        await worker.memory_used()
        await hand.broker.announce(CARD, life_ms=0)
    await raw.close()
    await connections.close()
    assert guarded.raw.xlen("{q:q:0}:dead") >= 2, "nothing died, so not all was tried"
    assert guarded.refusals() == []


async def test_gateway(guarded: Guarded, tmp_path: Path) -> None:
    hired = await working(guarded.url("worker"))
    key, file = new_key(), tmp_path / "keys.json"
    entry = new_tenant().model_copy(
        update={"keys": (KeyEntry(sha256=hash_of(key), created=date(2026, 1, 1)),), "max_open_requests": 10}
    )
    KeyFile(tenants={TENANT: entry}).write(file)
    settings: dict[str, Any] = {"keys_file": file, "files_dir": tmp_path, "rq_url": guarded.url("bulk")}
    async with (
        Gateway(guarded.url("gateway"), **settings) as gateway,
        httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {key}"}) as http,
    ):
        body = {"model": "q", "prompt": "a b c", "max_tokens": 8}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        id_ = answer.json()["id"].removeprefix("cmpl-")
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
        assert "[DONE]" in streamed.text
        assert (await http.get(f"/v1/requests/{id_}")).json()["state"] == "done"
        assert (await http.get(f"/v1/requests/{id_}/events")).status_code == 200
        assert (await http.delete(f"/v1/requests/{id_}")).status_code in (200, 409)
        for path in ("/readyz", "/v1/fleet", "/v1/models", "/info", "/metrics", "/v1/batches"):
            found = await http.get(path)
            assert found.status_code == 200, (path, found.text, guarded.refusals())
        await gateway.services.shares.write(0.0)
        assert set(guarded.raw.hkeys("{q:q:0}:shares")) == {TENANT.encode()}
        broker = gateway.services.directory.broker("q")
        await broker.sweep()
        await broker.usage()
        await broker.open_of(TENANT)
    await hired.dismiss()
    assert guarded.refusals() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_bulk(guarded: Guarded, tmp_path: Path) -> None:
    hired = await working(guarded.url("worker"))
    source = tmp_path / "in.jsonl"
    request = {"kind": "generate", "prompt": "a b", "max_tokens": 4}
    lines = [{"custom_id": f"{number}", "request": request} for number in range(5)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    env = environment(STREAMFLEET_REDIS_URL=guarded.url("bulk"), STREAMFLEET_QUEUE="q")
    begin_ = ("bulk", "run", "--detach", str(source), str(tmp_path / "out.jsonl"))
    begun = await asyncio.to_thread(streamfleet, *begin_, env=env)
    assert begun.returncode == 0, begun.stderr
    id_ = begun.stdout.split()[0]
    work = ("bulk", "worker", "--folder", str(tmp_path), "--burst")
    done = await asyncio.to_thread(streamfleet, *work, env=env)
    assert done.returncode == 0, done.stderr
    status = await asyncio.to_thread(streamfleet, "bulk", "status", id_, "--json", env=env)
    assert json.loads(status.stdout)["status"] == "completed", status.stdout
    answered = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(answered) == 5, (tmp_path / "out.errors.jsonl").read_text()
    again = await asyncio.to_thread(
        streamfleet, "bulk", "run", "--detach", str(source), str(tmp_path / "2.jsonl"), env=env
    )
    cancelled = await asyncio.to_thread(streamfleet, "bulk", "cancel", again.stdout.split()[0], env=env)
    assert cancelled.returncode == 0, cancelled.stderr
    with Batches(guarded.url("bulk")) as jobs:
        keyed = [
            jobs.create(source, tmp_path / f"{name}.out", tmp_path / f"{name}.err", fleet_queue="q", key="k")
            for name in "ab"
        ]
    assert keyed[0] == keyed[1]
    upkeep = Upkeep(BulkSettings(redis_url=guarded.url("bulk"), bulk_folder=str(tmp_path)))
    for job in (upkeep.sweep_queues, upkeep.remove_files, lambda: upkeep.trim_dead(1)):
        await asyncio.to_thread(job)
    await asyncio.to_thread(upkeep.warm_up, "q")
    await asyncio.to_thread(upkeep.replay_dead, "q", 6.0, 10)
    await hired.dismiss()
    assert guarded.refusals() == []


async def test_metrics_and_operator(guarded: Guarded) -> None:
    hired = await working(guarded.url("worker"))
    async with Client(guarded.url("producer"), "q") as fleet:
        assert len(await fleet.run_many([REQUEST, REQUEST])) == 2
    guarded.raw.xadd("{q:q:0}:dead", {"rid": "0" * 34, "why": "none"})
    for role in ("metrics", "operator"):
        async with Client(guarded.url(role), "q") as fleet:  # as `streamfleet queues` does
            assert await fleet.queues() == ["q"]
            assert (await fleet.depth()).dead == 1
            assert [card.worker for card in await fleet.models()] == ["w0"]

    connections = Connections.open(guarded.url("operator"))
    operator = OperatorBroker(connections, "q")
    assert [row.requests for row in await operator.usage()] == [2]
    (letter,) = await operator.dead_letters()
    assert await operator.dead_letter(letter.id) == letter
    assert await operator.drop_dead([letter.id]) == 1
    await operator.set_shares({"t": Share(1, 2, 3)})
    assert await operator.shares() == {"t": Share(1, 2, 3)}
    await operator.trim_dead(1)
    (submitted,) = await operator.submit([submission()])
    assert submitted.outcome == "accepted"
    assert (await control.pause(operator)).is_paused
    assert (await control.resume(operator)).has_changed
    assert (await control.drain(operator, "w0")).is_first
    await hired.ended()
    waiting = submission()
    await operator.submit([waiting])
    assert (await lanes.move(operator, to="bulk", source="normal")).moved == [waiting.envelope.rid]
    assert (await operator.backlog()).positions() == {waiting.envelope.rid: 1}
    assert await operator.cancel([waiting.envelope.rid], "default") == ["cancelled"]
    await connections.close()
    await hired.dismiss()
    assert guarded.refusals() == []


async def test_a_doctor_as_operator(guarded: Guarded) -> None:
    hired = await working(guarded.url("worker"))
    connections = Connections.open(guarded.url("operator"))
    checks = {(check.about, check.name): check for check in await examine(connections)}
    await connections.close()
    await hired.dismiss()
    # All of a queue is seen; of the server what takes an administrator is not, and that is said.
    assert {check.level for (about, _), check in checks.items() if about == "queue q"} <= {"ok", "warning"}
    unseen = {name for (_, name), check in checks.items() if check.level == "unseen"}
    assert unseen == {"subscribers", "keepalive", "idle", "slow calls"}
    assert "'operator'" in checks["server", "user"].words
    assert set(guarded.refusals()) <= {
        ("operator", "config|get"),
        ("operator", "slowlog|get"),
        ("operator", "acl|getuser"),
    }
