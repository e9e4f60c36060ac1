"""The publisher: what the engine brings forth becomes emit and finish calls, one of each for many requests.

It never holds the engine up. While a call is under way, new tokens of a request join those that wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Bill, Delivery, Emission, Finish
from streamfleet_common.errors import BrokerUnavailable, GenerationFailed
from streamfleet_common.schemas import Batch, Delta, End, Failure, Prefill
from streamfleet_common.schemas import Parts as PartsEvent
from streamfleet_common.trace_context import trace_of
from streamfleet_worker.engine.base import Arrival, Finished, Key, Output, Parts, Tokens
from streamfleet_worker.launch_log import Batches
from streamfleet_worker.metrics import Metrics, Noted

if TYPE_CHECKING:
    from streamfleet_worker.request_spans import Left, RequestSpans

MAX_BACKOFF_S = 2.0
MAX_RETRY_AFTER_S = 3600.0

log = structlog.get_logger()


@dataclass(slots=True)
class Held:
    """A request this worker answers for, from its start to its end."""

    delivery: Delivery
    tenant: str
    stream: bool
    kind: str = ""
    """What it asks for; "" if nobody can read it."""
    traceparent: str | None = None
    seq: int = 0
    """Number of the last event made."""
    prefill: Prefill | None = None
    tokens: list[Tokens] = field(default_factory=list)
    """What is not published yet, one for each choice."""
    parts: list[Any] = field(default_factory=list)
    """The same of an output that comes in parts."""
    finished: Finished | None = None
    is_told: bool = False
    """Its end is on its way, and says what it took, whoever has ended it."""
    prompt_tokens: int = 0
    """Of a text to be continued: those of its prompt."""
    has_begun: bool = False
    """They are being computed, or were."""
    generated_tokens: int = 0
    """Of all choices, so far."""
    held_at: float = 0.0
    """Loop time at which it was begun."""
    prepared_at: float = 0.0
    """Loop time at which it was put into the engine, noted for its spans alone; 0 if it was not."""
    finished_at: float = 0.0
    """Loop time at which it came to its end there, likewise."""

    def is_overdue(self, now: float) -> bool:
        """Whether its deadline has passed at this loop time, by the server's clock as it was at its start."""
        return self.delivery.now_ms + (now - self.held_at) * 1000 >= self.delivery.deadline_at_ms


class Publisher:
    """Owns what is held.

    `forget` is told of keys that nobody wants any more, `freed` that some have ended; `memory` says what the
    engine takes, for the answers to tell, `ran_out` whether the leases have not been renewed in time. All are
    called on the event loop and must not raise. `spans` makes the spans of what is over, if there is one.
    """

    def __init__(
        self,
        broker: Broker,
        metrics: Metrics,
        *,
        forget: Callable[[list[Key]], None],
        freed: Callable[[], None],
        memory: Callable[[], Mapping[str, int]] = dict,
        ran_out: Callable[[], bool] = lambda: False,
        spans: RequestSpans | None = None,
    ) -> None:
        self._memory = memory
        self._batches = Batches()
        self._ran_out = ran_out
        self._spans = spans
        self._broker = broker
        self._metrics = metrics
        self._forget = forget
        self._freed = freed
        self._held: dict[Key, Held] = {}
        self._dirty: dict[Key, Held] = {}
        self._dirty_since = 0.0
        """When the oldest of it was brought forth, by the clock of steps; meaningless while there is none."""
        self._telling_since: float | None = None
        """The same of what is on its way to Redis."""
        self._bills: list[Bill] = []
        """What is not told yet of requests that others have ended."""
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._told = asyncio.Event()
        self._told.set()

    @property
    def held(self) -> int:
        """Requests begun and not yet ended; or ended by others, and what they took is not told yet."""
        return len(self._held) + len(self._bills)

    def waiting_since(self) -> float | None:
        """When the oldest event was brought forth that Redis does not have yet, or None; from any thread."""
        dirty_since = self._dirty_since if self._dirty else None
        # In this order: what is dirty becomes what is told, and one of the two looks must find it.
        telling_since = self._telling_since
        return dirty_since if telling_since is None else telling_since

    def deliveries(self) -> list[Delivery]:
        """What is held, ended or not: until its end is told, it is ours to keep."""
        return [held.delivery for held in self._held.values()]

    def unfinished(self) -> list[Delivery]:
        """What is held and has not come to its end here."""
        return [held.delivery for held in self._held.values() if held.finished is None]

    def holds(self, key: Key) -> bool:
        """Whether this request is held, and its end not known yet."""
        held = self._held.get(key)
        return held is not None and held.finished is None

    def answers_for(self, key: Key) -> bool:
        """Whether this request is held, ended or not."""
        return key in self._held

    def places(self) -> set[str]:
        """Where the entries of what is held lie."""
        return {held.delivery.entry.place for held in self._held.values()}

    def hold(
        self,
        delivery: Delivery,
        *,
        tenant: str,
        stream: bool,
        kind: str = "",
        traceparent: str | None = None,
    ) -> None:
        """Answer for a request from now on."""
        now = asyncio.get_running_loop().time()
        self._held[delivery.key] = Held(delivery, tenant, stream, kind, traceparent, held_at=now)
        self._empty.clear()

    def prepared(self, arrivals: Mapping[Key, Arrival]) -> None:
        """These are put into the engine now."""
        now = 0.0 if self._spans is None else asyncio.get_running_loop().time()
        for key, arrival in arrivals.items():
            held = self._held[key]
            held.prepared_at = now
            if held.kind == "generate":
                # Other work is done at once or not at all, and counts when it is.
                held.prompt_tokens = arrival.prepared.prompt_tokens

    def begun(self, keys: Iterable[Key]) -> None:
        """The engine is at work on these."""
        for key in keys:
            held = self._held.get(key)
            if held is not None:
                held.has_begun = True

    def take(self, outputs: list[Output], at: float | None = None) -> None:
        """Take what a step brought forth that was over `at` this time, or just now; returns at once."""
        if not self._dirty:
            self._dirty_since = time.perf_counter() if at is None else at
        for output in outputs:
            held = self._held.get(output.key)
            if held is None or held.finished is not None:
                continue  # lost meanwhile
            event = output.event
            if isinstance(event, Finished):
                held.finished = event
                if self._spans is not None:
                    held.finished_at = asyncio.get_running_loop().time()
            elif isinstance(event, Tokens):
                held.generated_tokens += len(event.token_ids)
                if not held.stream:
                    continue  # the end will tell it all
                _merge(held.tokens, event)
            elif not held.stream:
                continue
            elif isinstance(event, Parts):
                held.parts += event.values
            else:
                held.prefill = event
            self._dirty[output.key] = held
        if self._dirty:
            self._told.clear()
            self._work.set()

    def lose(self, keys: list[Key], how: Left = "lost") -> None:
        """Fall silent about these: they are not this worker's any more.

        Those that are lost may have been ended: what they took is told once more, for their tenants' sake.
        """
        gone = [held for key in keys if (held := self._held.pop(key, None)) is not None]
        if not gone:
            return
        lost = [held.delivery.key for held in gone]
        now = asyncio.get_running_loop().time()
        for held in gone:
            self._dirty.pop(held.delivery.key, None)
            if how == "lost" and (bill := _bill(held)) is not None:
                self._bills.append(bill)
                self._work.set()
            log.debug("request left", **_about(held), how=how)
            if self._spans is not None:
                self._spans.left(held, how, now)
        if how != "handed_back":
            if self._ran_out():
                self._metrics.leases_lost(len(lost))
            else:
                # Nobody may have taken them: they were cancelled, or a sweep has ended them and counts that.
                self._metrics.cancelled(sum([not held.is_overdue(now) for held in gone]))
        self._forget(lost)
        self._settle()

    async def wait_told(self) -> None:
        """Until all that was taken so far is published."""
        await self._told.wait()

    async def wait_empty(self) -> None:
        """Until every request held has ended, and nothing is left to be told of others."""
        await self._empty.wait()

    async def run(self, identity: End) -> None:
        """Publish until cancelled. `identity` is what every end says about this worker."""
        while True:
            await self._work.wait()
            self._work.clear()
            self._telling_since = self._dirty_since if self._dirty else None
            await self._publish(identity)
            self._telling_since = None
            if not self._dirty:
                self._told.set()

    async def _publish(self, identity: End) -> None:
        dirty, self._dirty = self._dirty, {}
        emissions: list[Emission] = []
        finishes: list[tuple[Held, End]] = []
        if any(held.finished is not None for held in dirty.values()):
            identity = identity.changed({"memory": dict(self._memory())})
        for held in dirty.values():
            emissions += self._emissions(held)
            if held.finished is not None:
                batch = self._batches.of(identity.worker, held.finished.launch)
                finishes.append((held, _end(identity, held, held.finished, batch)))
        if emissions:
            await self._emit(emissions)
        finishes = [(held, end) for held, end in finishes if held.delivery.key in self._held]
        if finishes or self._bills:
            await self._finish(identity, finishes)

    def _emissions(self, held: Held) -> list[Emission]:
        prefill, tokens, parts = held.prefill, held.tokens, held.parts
        held.prefill, held.tokens, held.parts = None, [], []
        bodies = []
        try:
            if prefill is not None:
                bodies.append(codec.encode(prefill))
            bodies += [codec.encode(_delta(some)) for some in tokens]
            if parts:
                bodies.append(codec.encode(PartsEvent(values=tuple(parts))))
        except Exception as error:  # noqa: BLE001 (what has no bytes fails its own request alone)
            held.finished = _unusable(held, error)
            self._forget([held.delivery.key])
            return []
        first = held.seq + 1
        held.seq += len(bodies)
        return [Emission(held.delivery, held.tenant, seq, body) for seq, body in enumerate(bodies, first)]

    # --- calls

    async def _emit(self, emissions: list[Emission]) -> None:
        # Repeated until answered, with the same events: the log drops what it has already.
        ours = await _insist(lambda: self._broker.emit(emissions))
        lost = [emission.delivery.key for emission, ok in zip(emissions, ours, strict=True) if not ok]
        self._fenced(lost)

    async def _finish(self, identity: End, finishes: list[tuple[Held, End]]) -> None:
        metrics = self._metrics
        noted = metrics.noted([end for _, end in finishes])
        calls, bills = _calls(finishes), [*self._bills]
        for held, _ in finishes:
            held.is_told = True
        try:
            ours = await _insist(lambda: self._broker.finish(calls, bills))
        except Exception:  # noqa: BLE001 (one of them has no bytes, and must not take the others along)
            finishes = [(held, _checked(identity, held, end)) for held, end in finishes]
            noted = metrics.noted([end for _, end in finishes])
            again = calls = _calls(finishes)
            ours = await _insist(lambda: self._broker.finish(again, bills))
        del self._bills[: len(bills)]
        lost = []
        ended: list[Noted] = []
        latencies_s: list[float] = []
        now = asyncio.get_running_loop().time()
        says_so = log.is_enabled_for(logging.DEBUG)
        for (held, end), call, note, ok in zip(finishes, calls, noted, ours, strict=True):
            key = held.delivery.key
            if not ok:
                lost.append(key)
            elif self._held.pop(key, None) is not None:
                if self._spans is not None:
                    self._spans.ended(held, end, now)
                if call.went_back:
                    # Whoever runs it next counts its end: of one that succeeds then nobody felt a failure.
                    log.debug("request left", **_about(held), **_outcome(end), how="tried_again")
                    continue
                if says_so:
                    log.debug("request ended", **_about(held), **_outcome(end))
                delivery = held.delivery
                ended.append(note)
                latencies_s.append((delivery.now_ms - delivery.accepted_at_ms) / 1000 + now - held.held_at)
        if ended:
            metrics.ended(ended, latencies_s)
        self._fenced(lost)
        self._settle()

    def _fenced(self, keys: list[Key]) -> None:
        lost = [key for key in dict.fromkeys(keys) if key in self._held]
        self._metrics.fenced(len(lost))
        self.lose(lost)

    def _settle(self) -> None:
        if not self.held:
            self._empty.set()
        self._freed()


def _end(identity: End, held: Held, finished: Finished, batch: Batch | None = None) -> End:
    return identity.changed(
        {
            "state": finished.state,
            "choices": finished.choices,
            "answers": finished.answers,
            "embeddings": finished.embeddings,
            "classifications": finished.classifications,
            "ranking": finished.ranking,
            "outputs": finished.outputs,
            # A stream has told it already.
            "prefill": None if held.stream else finished.prefill,
            "error": Failure.of(finished.error) if finished.error is not None else None,
            "usage": finished.usage,
            "seed": finished.seed,
            "timing": finished.timing,
            "batch": batch,
            "of": held.delivery.epoch if finished.state == "done" or finished.choices else 0,
            "last_seq": held.seq,
        }
    )


def _bill(held: Held) -> Bill | None:
    """What a request took that is gone before its end was told; None if nothing, or if it is told anyway."""
    if held.is_told:
        return None
    prompt, generated = held.prompt_tokens if held.has_begun else 0, held.generated_tokens
    if held.finished is not None:
        prompt, generated = held.finished.usage.prompt_tokens, held.finished.usage.completion_tokens
    if not prompt and not generated:
        return None
    return Bill(held.delivery.entry.rid, held.delivery.fence, prompt, generated)


def _about(held: Held) -> dict[str, Any]:
    """What a log line says of which request it is about."""
    rid, epoch = held.delivery.key
    return {"rid": rid, "epoch": epoch, **trace_of(held.traceparent)}


def _outcome(end: End) -> dict[str, str]:
    return {"outcome": end.state} if end.error is None else {"outcome": end.state, "code": end.error.code}


def _delta(tokens: Tokens) -> Delta:
    return Delta(
        index=tokens.index,
        token_ids=tuple(tokens.token_ids),
        texts=tuple(tokens.texts),
        logprobs=tuple(tokens.logprobs),
        top_logprobs=tuple(tokens.top_logprobs),
    )


def _unusable(held: Held, error: Exception) -> Finished:
    kind = type(error).__name__
    log.error("answer cannot be put into a message", **_about(held), error=kind)
    return Finished("failed", error=GenerationFailed(f"the answer cannot be put into a message ({kind})"))


def _calls(finishes: list[tuple[Held, End]]) -> list[Finish]:
    return [
        Finish(
            held.delivery, end, retry=_may_retry(held.finished), retry_after_ms=_retry_after_ms(held.finished)
        )
        for held, end in finishes
    ]


def _retry_after_ms(finished: Finished | None) -> int | None:
    after_s = None if finished is None else finished.retry_after_s
    # In this order, in which what is no number is the longest.
    return None if after_s is None else max(0, round(min(MAX_RETRY_AFTER_S, after_s) * 1000))


def _may_retry(finished: Finished | None) -> bool:
    """Whether another attempt may do better; its policy has the last word."""
    return (
        finished is not None
        and finished.state == "failed"
        and bool(getattr(finished.error, "retryable", False))
    )


def _checked(identity: End, held: Held, end: End) -> End:
    try:
        codec.encode(end)
    except Exception as error:  # noqa: BLE001
        return _end(identity, held, _unusable(held, error))
    return end


async def _insist(call: Callable[[], Awaitable[list[bool]]]) -> list[bool]:
    failures = 0
    while True:
        try:
            return await call()
        except BrokerUnavailable as error:
            failures += 1
            pause_s = random.uniform(0, min(MAX_BACKOFF_S, 0.1 * 2**failures))
            log.warning("nothing can be published", error=str(error), retry_in_s=round(pause_s, 2))
            await asyncio.sleep(pause_s)


def _merge(waiting: list[Tokens], new: Tokens) -> None:
    for tokens in waiting:
        if tokens.index == new.index:
            tokens.token_ids += new.token_ids
            tokens.texts += new.texts
            tokens.logprobs += new.logprobs
            tokens.top_logprobs += new.top_logprobs
            return
    # Copies, since these lists grow here: the engine's own stay the engine's.
    waiting.append(Tokens(new.index, [*new.token_ids], [*new.texts], [*new.logprobs], [*new.top_logprobs]))
