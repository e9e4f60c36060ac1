"""Random requests in random company: each gets what its own items come to, and nothing is left behind."""

from __future__ import annotations

import gc
import random
import types
from collections import Counter
from typing import Any

import pytest

from item_models import Bench, Elsewhere, ElsewhereRunner, text
from streamfleet_worker.engine.answer_cache import AnswerCache
from streamfleet_worker.engine.item import Done, ItemSpec, Outcome, Part

BAD_ALONE, BAD_FOR_ALL = "bad alone", "bad for all"


def result_of(value: tuple[int, str]) -> str:
    """What an item comes to, whoever asks for it and wherever it runs."""
    number, kind = value
    return f"{number * number % 9973} of {number}, {kind}"


class Crowd:
    """Asks, leaves, lets time pass and batches end, all at random.

    Args:
        seed: of it all.
        faults: whether some items fail, by themselves or with all of their batch.
        leaves: whether some requests are cancelled or expire.
    """

    def __init__(self, seed: int, *, faults: bool, leaves: bool, answers: AnswerCache | None = None) -> None:
        self.random = random.Random(seed)
        self.faults, self.leaves = faults, leaves
        self.runner = ElsewhereRunner(slots=self.random.randint(1, 3), ahead=self.random.randint(0, 1))
        self.fleet = Bench(
            self.runner,
            size=self.random.choice([1, 3, 8, 32]),
            window=4,
            delay=self.random.choice([0.0, 0.05, 1.0]),
            max_batch_tokens=self.random.choice([64, 500, 10_000]),
            length_step=self.random.choice([1, 16]),
            uniform=self.random.random() < 0.3,
            answers=answers,
        )
        self.asked: dict[str, list[tuple[int, str]]] = {}
        self.runs: Counter[tuple[int, str]] = Counter()
        self.numbers = self.requests = 0

    def item(self) -> ItemSpec:
        self.numbers += 1
        kind = "plain"
        if self.faults and self.random.random() < 0.03:
            kind = self.random.choice([BAD_ALONE, BAD_FOR_ALL])
        is_equal = self.random.random() < 0.3
        number = self.random.randint(1, 20) if is_equal else 1000 + self.numbers
        return text(
            (number, kind),
            # Equal items are equally long, as texts are.
            length=number * 7 % 150,
            group=f"group {number % 2}",
            digest=f"{number} {kind}".encode() if is_equal else None,
        )

    def ask(self) -> int:
        items = [self.item() for _ in range(self.random.choice([0, 1, 1, 1, 2, 5, 20]))]
        self.requests += 1
        name = f"r{self.requests}"
        self.asked[name] = [item.value for item in items]
        life = self.random.choice([0.01, 0.5, 5.0]) if self.leaves and self.random.random() < 0.1 else 1e6
        self.fleet.ask(name, *items, age=self.random.choice([0.0, 0.0, 0.5, 30.0]), life=life)
        return len(items)

    def act(self) -> None:
        chance = self.random.random()
        if self.leaves and chance < 0.1 and self.asked:
            name = self.random.choice(list(self.asked)[-20:])
            if name not in self.fleet.ends:
                self.fleet.cancel(name)
                del self.asked[name]
        elif chance < 0.4:
            self.fleet.clock.now += self.random.choice([0.001, 0.05, 0.5])
        elif chance < 0.7:
            self.end_one()
        if self.fleet.engine.due_in() == 0:
            self.fleet.step()

    def end_one(self) -> None:
        waiting = [batch for batch in self.runner.running if not batch.news and not batch.closed]
        if not waiting:
            return
        batch = self.random.choice(waiting)
        self.runner.running = [one for one in self.runner.running if one is not batch and not one.closed]
        self.runner.batches.clear()
        self.answer(batch)

    def answer(self, batch: Elsewhere) -> None:
        values = batch.batch.values
        if any(kind == BAD_FOR_ALL for _, kind in values):
            batch.news.append(ValueError("the whole batch"))
            return
        self.runs.update(values)
        outcomes: list[Outcome] = [
            ValueError("this one") if kind == BAD_ALONE else Done(result_of((number, kind)))
            for number, kind in values
        ]
        some = [one if self.random.random() < 0.5 else None for one in outcomes]
        if self.random.random() < 0.3:
            batch.tell(*some, ended=False)
            outcomes = [None if told is not None else one for told, one in zip(some, outcomes, strict=True)]
        batch.tell(*outcomes)

    def run(self, items: int) -> None:
        asked = 0
        while asked < items:
            if self.fleet.engine.room().rows:
                asked += self.ask()
            self.act()
        for _ in range(100_000):
            if self.fleet.engine.due_in() is None:
                return
            self.fleet.clock.now += 0.05
            self.end_one()
            while self.fleet.engine.due_in() == 0:
                self.fleet.step()
        raise AssertionError("it never comes to rest")

    def check(self) -> None:
        fleet = self.fleet
        assert fleet.ends.keys() == self.asked.keys(), "each has an end, but for those that were cancelled"
        for name, values in self.asked.items():
            end = fleet.ends[name]
            if end.state == "expired":
                continue
            bad = [place for place, (_, kind) in enumerate(values) if kind != "plain"]
            if not bad:
                assert fleet.outputs(name) == [result_of(value) for value in values]
            else:
                assert end.state == "failed"
                if len(values) > 1:
                    assert fleet.error(name).details["item"] in bad


@pytest.mark.parametrize("seed", range(40))
def test_each_gets_what_its_own_items_come_to(seed: int) -> None:
    crowd = Crowd(seed, faults=seed % 2 == 1, leaves=seed % 4 >= 2)
    crowd.run(500)
    crowd.check()
    crowd.fleet.assert_empty()
    # What is like no other runs once, and all of it if nobody leaves.
    own = [value for values in crowd.asked.values() for value in values if value[0] > 1000]
    if not crowd.faults:
        assert all(count == 1 for (number, _), count in crowd.runs.items() if number > 1000)
    if not crowd.faults and not crowd.leaves:
        assert sorted(value for value in crowd.runs if value[0] > 1000) == sorted(own)
        assert any(value[0] <= 20 for value in crowd.runs)


def reachable(root: object) -> int:
    """Objects that are kept alive by this one, code aside."""
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    seen = {id(root)}
    waiting = [root]
    while waiting:
        for one in gc.get_referents(waiting.pop()):
            if id(one) not in seen and not isinstance(one, code):
                seen.add(id(one))
                waiting.append(one)
    return len(seen)


@pytest.mark.slow
def test_nothing_grows_in_ten_thousand_requests() -> None:
    crowd = Crowd(7, faults=True, leaves=True, answers=AnswerCache(20_000, ttl_s=1.0))
    sizes = []
    while crowd.requests < 10_000:
        crowd.run(1500)
        crowd.check()
        crowd.fleet.assert_empty()
        for told in (crowd.asked, crowd.fleet.ends, crowd.fleet.ended_at, crowd.fleet.known, crowd.runs):
            told.clear()
        crowd.runner.batches.clear()
        crowd.runner.running.clear()
        sizes.append(reachable(crowd.fleet.engine))
    assert len(sizes) > 10
    # The cache has filled up in the first round, and holds now more of them, now fewer.
    assert max(sizes[5:]) < 1.3 * max(sizes[:5])
    cache: Any = crowd.fleet.engine._answers
    assert cache.bytes <= 20_000


def test_streams_of_many_are_not_mixed_up() -> None:
    chance = random.Random(3)
    runner = ElsewhereRunner(slots=2)
    fleet = Bench(runner, size=8, delay=0.0)
    for number in range(60):
        fleet.ask(f"r{number}", number)
    given: dict[int, list[str]] = {number: [] for number in range(60)}
    while len(fleet.ends) < 60:
        while fleet.engine.due_in() == 0:
            fleet.step()
        for batch in [batch for batch in runner.running if not batch.closed]:
            outcomes: list[Outcome] = []
            for value in batch.batch.values:
                if f"r{value}" in fleet.ends or chance.random() < 0.3:
                    outcomes.append(None)
                elif len(given[value]) == value % 5:
                    outcomes.append(Done())
                else:
                    given[value].append(f"{value}.{len(given[value])}")
                    outcomes.append(Part(given[value][-1]))
            batch.tell(*outcomes, ended=False)
    for number in range(60):
        expected = [f"{number}.{part}" for part in range(number % 5)]
        assert fleet.parts.get(f"r{number}", []) == expected
        assert fleet.ends[f"r{number}"].outputs == ((expected or None),)
    assert all(batch.closed == 1 for batch in runner.running)
    fleet.assert_empty()
