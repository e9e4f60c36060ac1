"""What is going to be asked and broken in a run: all of it drawn from one seed, before anything begins."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from streamfleet_common.schemas import LANES, Lane

TENANTS = ("amber", "birch", "cedar")
How = Literal["events", "deltas", "answer", "fetch", "attach"]
"""A stream with its restarts, a stream of one text, a call that waits; a receipt, then a question, or then a
stream."""
Twist = Literal["", "cancel", "leave", "again", "conflict", "foreign"]
"""Nothing; cancel it, leave its stream, submit it twice, or another under its key, let others ask for it."""

FaultKind = Literal[
    "kill worker", "pause worker", "drain worker", "move waiting",
    "kill redis", "end redis", "stall redis", "pause writes", "cut normal", "cut pubsub",
    "worker line cut", "worker line black", "worker line half open", "worker line slow", "worker line deaf",
    "client line cut", "client line black", "client line flaps", "client line slow", "client line deaf",
]  # fmt: skip
WEIGHTS: dict[FaultKind, float] = {
    "kill worker": 5, "pause worker": 3, "drain worker": 3, "move waiting": 4,
    "kill redis": 1, "end redis": 0.7, "stall redis": 2, "pause writes": 1, "cut normal": 2, "cut pubsub": 2,
    "worker line cut": 2, "worker line black": 1, "worker line half open": 1, "worker line slow": 1,
    "worker line deaf": 2,
    "client line cut": 1, "client line black": 1, "client line flaps": 1, "client line slow": 1,
    "client line deaf": 3,
}  # fmt: skip
POISONS = ("CRASH", "CRASH", "CRASH", "OOM", "HANG")


@dataclass(frozen=True, slots=True)
class Wish:
    """One request, and how it is asked for. `at_s` is seconds from the start."""

    at_s: float
    word: str
    tenant: str
    count: int
    prompt: str
    how: How
    lane: Lane
    twist: Twist = ""
    twist_s: float = 0.0
    is_keyed: bool = True
    is_signed: bool = False
    is_poison: bool = False
    may_block: bool = False
    """It may hold its worker for nearly as long as a lease."""
    on_restart: Literal["restart", "fail"] = "restart"
    deadline_s: float = 120.0
    fates: frozenset[str] = frozenset({"done"})

    @property
    def streams(self) -> bool:
        return self.how in ("events", "deltas", "attach")


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault; `strength`, 0 to 1, is what its length is made of, `choice` whom it hits."""

    at_s: float
    kind: FaultKind
    strength: float
    choice: float


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    lease_s: float
    wishes: list[Wish]
    faults: list[PlannedFault] = field(default_factory=list)

    @classmethod
    def draw(
        cls,
        seed: int,
        requests: int,
        *,
        rate: float = 20.0,
        fault_every_s: float = 1.5,
        lease_s: float = 2.0,
        only_poison: bool = False,
    ) -> Plan:
        """A run of so many requests, `rate` a second; with `only_poison` requests alone break something."""
        source = random.Random(seed)
        words = _words(source, requests)
        wishes, at_s = [], 0.0
        for word in words:
            at_s += source.expovariate(rate)
            wishes.append(_wish(source, at_s, word, lease_s))
        faults: list[PlannedFault] = []
        fault_s = 1.0
        while not only_poison and fault_s < at_s:
            (kind,) = source.choices(list(WEIGHTS), list(WEIGHTS.values()))
            faults.append(PlannedFault(fault_s, kind, source.random(), source.random()))
            fault_s += source.uniform(0.3, 1.7) * fault_every_s
        return cls(seed, lease_s, wishes, faults)


def _words(source: random.Random, count: int) -> list[str]:
    """Distinct, of letters alone, so that a number behind one can be told from it."""
    words: set[str] = set()
    while len(words) < count:
        words.add("".join(source.choices(string.ascii_lowercase, k=6)))
    return sorted(words, key=lambda _: source.random())


def _wish(source: random.Random, at_s: float, word: str, lease_s: float) -> Wish:
    count, tick_ms = source.randint(3, 25), source.choice([5, 15, 30, 60])
    is_signed = source.random() < 0.5
    at = source.randint(0, count - 1)
    how: How = source.choice(get_args(How))
    prompt = f"ECHO {count} AS {word} TICK {tick_ms}" + (" SIGNED" if is_signed else "")
    plain = Wish(
        at_s=at_s,
        word=word,
        tenant=source.choice(TENANTS),
        count=count,
        prompt=prompt,
        how=how,
        lane=source.choice(LANES),
        is_signed=is_signed,
        twist_s=source.random(),
    )
    kinds: dict[str, tuple[float, dict[str, object]]] = {
        "poison": (
            1.3,
            {"prompt": f"{prompt} {source.choice(POISONS)}@{at}", "is_poison": True, "fates": _only("dead")},
        ),
        "fails": (1.2, {"prompt": f"{prompt} RAISE@{at}", "fates": _only("failed")}),
        "keeps failing": (1.0, {"prompt": f"{prompt} RETRY@{at}", "fates": _only("failed")}),
        "fails once": (1.0, {"prompt": f"{prompt} RETRY@{at}:1"}),
        "blocks": (0.5, {"prompt": f"{prompt} BLOCK@{at}:{0.5 * lease_s:.2f}", "may_block": True}),
        "short": (3.0, {"deadline_s": source.uniform(0.3, 2.0), "fates": _only("done", "expired")}),
        "no restart": (3.0, {"on_restart": "fail", "fates": _only("done", "failed")}),
        "cancel": (5.0, {"twist": "cancel", "fates": _only("done", "cancelled")}),
        "twisted": (6.0, {"twist": source.choice(["again", "conflict", "foreign"])}),
        "without a key": (20.0, {"is_keyed": False}),
        "plain": (55.0, {}),
    }
    if how in ("events", "deltas"):
        leaves = {"twist": "leave", "is_keyed": False, "fates": _only("done", "cancelled")}
        kinds["leave"] = (3.0, leaves)
    (kind,) = source.choices(list(kinds), [weight for weight, _ in kinds.values()])
    if kind == "poison" and how == "deltas":
        plain = replace(plain, how="events")  # a text that begins anew would end it before its time
    return replace(plain, **kinds[kind][1])  # type: ignore[arg-type]


def _only(*states: str) -> frozenset[str]:
    return frozenset(states)
