"""All orders in which two workers, a sweeper and a client can treat one request, up to so many steps.

The search goes over the model; a sample of its ways is then gone on the real server, which must agree at each
step.
"""

from __future__ import annotations

import random

import pytest

from broker_parts import STREAMS, submission
from queue_machine import Fleet
from world import World, search

SEED = 20


class Replay(Fleet):
    """Goes a way on the server."""

    def go(self, way: list[str]) -> None:
        self.begin()
        try:
            self.submit_all([submission(stream=True)])
            for action in way:
                self.act(action)
                self.the_server_holds_what_the_model_says()
                self.records_are_what_the_model_says()
                self.logs_and_channels_tell_each_event_once()
        finally:
            self.teardown()

    def act(self, action: str) -> None:
        who, _, step = action.partition(" ")
        if step == "cancel":
            self.cancel([0], self.queue.requests[0].tenant)
        elif step == "sweep":
            self.sweep()
        elif step == "pause":
            self.advance(12)
        elif step == "lease passes":
            for _ in range(4):
                self.advance(4)
                self.sweep()
        elif step == "reads":
            stream = next(stream for stream in STREAMS if self.queue.unread(stream))
            self.read(who, [stream], 1)
        elif step == "starts":
            known = [item.owner == who for _, item in reversed(self.entries)]
            self.start(who, [known.index(True) if True in known else 0])
        elif step == "is handed back":
            self.hand_back(who, True)
        elif step != "crashes":
            self.write(who, step)

    def write(self, who: str, step: str) -> None:
        at = [delivery.owner for delivery, _ in reversed(self.deliveries)].index(who)
        if step == "emits":
            self.emit([(at, "", 2)], 1)
        elif step == "finishes":
            self.finish([(at, "", "done")], False)
        elif step == "retries":
            self.finish([(at, "", "retry")], False)
        elif step == "renews":
            self.renew(who, [(at, "")])
        else:
            self.release([(at, "", True)])


@pytest.mark.parametrize(
    ("depth", "least", "sample"),
    [
        pytest.param(6, 500, 20, id="quick"),
        pytest.param(10, 5000, 400, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_every_order_keeps_the_promises(redis_url: str, depth: int, least: int, sample: int) -> None:
    count, ways = search(depth)
    assert count > least
    Replay.url = redis_url
    for way in random.Random(SEED).sample(ways, min(sample, len(ways))):
        try:
            Replay().go(way)
        except AssertionError as error:
            raise AssertionError(f"the server does not agree on {way}") from error


def test_every_way_can_still_come_to_an_end() -> None:
    """From wherever it stopped: two workers that live and sweeps on time bring any request to its end."""
    _, ways = search(5)
    for way in ways:
        world = World.begin()
        for action in way:
            world.act(action)
        for _ in range(12):
            for action in ("a lease passes", "w1 reads", "w1 starts", "w1 finishes"):
                if action in set(world.actions()):
                    world.act(action)
        assert not world.request.is_open, way
        assert not any(world.queue.items.values())
