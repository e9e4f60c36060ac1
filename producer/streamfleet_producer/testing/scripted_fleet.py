"""A fleet in memory, for the tests of services: no server, no thread, no model, no time that passes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from streamfleet_common import codec
from streamfleet_common.cards import Card, Limits
from streamfleet_common.keys import Keys
from streamfleet_common.one_shot import HandlerCard
from streamfleet_common.schemas import End, Envelope, Failure, FinishReason, Request, Start, State
from streamfleet_common.submissions import Refused
from streamfleet_producer.blocking import Settings
from streamfleet_producer.testing.memory_channels import MemoryChannels
from streamfleet_producer.testing.memory_queue import MemoryQueue, MemoryRequest
from streamfleet_producer.testing.performance import Performance
from streamfleet_producer.testing.script import ANYTHING, Match, Rule
from streamfleet_producer.testing.scripted_client import BlockingScriptedClient, ScriptedClient, ScriptedLink
from streamfleet_producer.testing.virtual_time import VirtualTime

TASKS = ("generate", "decide", "embed", "classify", "rerank")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was accepted: what a worker would have read, and what became of it."""

    _of: MemoryRequest

    @property
    def id(self) -> str:
        return self._of.envelope.rid

    @property
    def envelope(self) -> Envelope:
        """All that was said about it: lane, tenant, deadline and others."""
        return self._of.envelope

    @property
    def request(self) -> Request:
        return self._of.envelope.request

    @property
    def state(self) -> State:
        """Where it stands now."""
        return self._of.state


class ScriptedFleet:
    """Answers requests as a test has told it to; `async with` or `with` it, then give its clients away.

    ::

        async with ScriptedFleet() as fleet, fleet.client() as client:
            fleet.on_generate("Hello", "wor", "ld")
            assert (await client.run(GenerateRequest(prompt="Hello"))).text == "world"
            assert fleet.asked[0].request.prompt == "Hello"

    Its clients are the real ones: everything but Redis and the worker is what runs in production. Requests
    are encoded, decoded and validated on their way, and refused by the worker's card as they would be.

    A script is a list of steps. Texts are tokens of a generate request; see `on_embed` and its sisters for
    the others. `Wait(seconds)` lets the fleet's time pass, `NEVER` leaves the rest to the deadline, `Lost()`
    loses the worker, an error fails the request with it, an `End` ends it. A function is called with the
    request and gives what is to stand in its place. Of the rules that match, the first is taken.

    `time`: it never passes by itself. "jumps": whenever somebody waits, it goes on to what comes next, so
    nothing takes long. "stands": only `advance` moves it, which is for tests of what happens meanwhile.

    Raises, when left: AssertionError, if a request came that no rule matched, or whose script could not be
    played; the request itself failed with GenerationFailed.

    Args:
        queue: its name.
        model: the name on its worker's card.
        tasks: the kinds of request that the card names; handlers add theirs.
        time: see above.
        exact: the class of workers that promise each other's bits; "" promises nothing. With one, a request
            whose worker is lost goes on where it was, as long as the next attempt says the same.
        max_seq_len: tokens, on the card.
        max_queue_depth: open requests beyond which submissions are refused.
    """

    def __init__(
        self,
        queue: str = "default",
        *,
        model: str = "scripted",
        tasks: Sequence[str] = TASKS,
        time: Literal["jumps", "stands"] = "jumps",
        exact: str = "",
        max_seq_len: int = 32_768,
        max_queue_depth: int = 1024,
    ) -> None:
        self.queue = queue
        self.time = VirtualTime(jumps=time == "jumps")
        self.time.is_waited_for = lambda: any(len(link.watch) for link in self.links)
        self.channels = MemoryChannels()
        self.memory = MemoryQueue(
            Keys(queue), self.time, self.channels.publish, self._accept, max_queue_depth
        )
        self.links: set[ScriptedLink] = set()
        """The clients that are open."""
        self.asked: list[Asked] = []
        """Every request that was accepted, in order."""
        self.cards: list[Card] = []
        """What clients are told of the workers."""
        self.faults: list[str] = []
        """What was wrong with the scripts."""
        self._rules: list[Rule] = []
        self._limits = Limits(
            max_batch_size=1024,
            max_seq_len=max_seq_len,
            max_queue_depth=max_queue_depth,
            max_request_bytes=codec.MAX_REQUEST_BYTES,
        )
        self._cards = [self._card(model, tuple(tasks))]
        self._start = Start(worker="scripted", model=model, exact=exact)
        self.start_workers()

    # --- its clients

    def client(self, **settings: Unpack[Settings]) -> ScriptedClient:
        """A client of this fleet, to be opened as any other; its settings are those of `Client`."""
        return ScriptedClient(self, self.queue, **settings)

    def blocking_client(self, **settings: Unpack[Settings]) -> BlockingScriptedClient:
        """The same of `blocking.Client`, whose event loop has a thread of its own, as always.

        A fleet serves the clients of one event loop, so it has one of these at a time.
        """
        return BlockingScriptedClient(self, self.queue, **settings)

    # --- what is answered

    def on_generate(
        self,
        match: Match,
        *steps: Any,
        times: float = math.inf,
        queued_s: float = 0.0,
        finish_reason: FinishReason = "eos",
    ) -> Rule:
        """Answer generate requests: a string is a token, of every choice; a `Delta` or `Prefill` is itself.

        An answer is cut at `max_tokens`, with "length" for its reason; stop strings are not looked for.
        `times`: so many requests, then the next rule has its turn. `queued_s`: how long each waits for a
        worker.
        """
        return self._add(Rule("generate", match, steps, times, queued_s, finish_reason))

    def on_embed(self, match: Match, *steps: Any, times: float = math.inf, queued_s: float = 0.0) -> Rule:
        """Answer embed requests: a list of vectors, one for each text, or a function that makes it."""
        return self._add(Rule("embed", match, steps, times, queued_s))

    def on_classify(self, match: Match, *steps: Any, times: float = math.inf, queued_s: float = 0.0) -> Rule:
        """Answer classify requests: for each text a map of labels to scores."""
        return self._add(Rule("classify", match, steps, times, queued_s))

    def on_rerank(self, match: Match, *steps: Any, times: float = math.inf, queued_s: float = 0.0) -> Rule:
        """Answer rerank requests: for each document its score."""
        return self._add(Rule("rerank", match, steps, times, queued_s))

    def on_decide(self, match: Match, *steps: Any, times: float = math.inf, queued_s: float = 0.0) -> Rule:
        """Answer decide requests: by question its option, or a map of all options to their scores."""
        return self._add(Rule("decide", match, steps, times, queued_s))

    def on_call(
        self,
        handler: str,
        *steps: Any,
        match: Match = ANYTHING,
        times: float = math.inf,
        queued_s: float = 0.0,
        streams: bool = False,
        input_schema: str = "",
    ) -> Rule:
        """Serve a handler, and answer calls of it: a JSON value is its output.

        With `streams` each value is a part of it. `input_schema` (JSON Schema as text) refuses other inputs.
        A string in `match` matches nothing here: give a function of the request.
        """
        if all(card.model != handler or card.handler is None for card in self._cards):
            about = HandlerCard(input_schema=input_schema, streams=streams)
            self._cards.append(self._card(handler, ("call",), handler=about))
            self.start_workers()
        rule = Rule("call", match, steps, times, queued_s, handler=handler, streams=streams)
        return self._add(rule)

    # --- what goes wrong

    def refuse(
        self, reason: Refused = "requests", *, retry_after_s: float = 1.0, times: int | None = None
    ) -> None:
        """Take no submissions: the next so many, or all until `accept`."""
        if times is None:
            self.memory.closed = (reason, retry_after_s)
        else:
            self.memory.refusals += [(reason, retry_after_s)] * times

    def accept(self) -> None:
        """Take submissions again."""
        self.memory.closed = None
        self.memory.refusals.clear()

    def stop_workers(self) -> None:
        """Leave the queue without workers: it takes requests, which wait. Running ones go on."""
        self.cards.clear()

    def start_workers(self) -> None:
        """Let workers serve the queue, and begin what waits."""
        self.cards[:] = self._cards
        for request in self.memory.waiting():
            self._perform(request)

    def go_down(self) -> None:
        """Let Redis be away: every call of a client raises BrokerUnavailable, and messages are lost."""
        self.channels.is_down = True

    def come_back(self) -> None:
        """Let Redis be back, with all that it had."""
        self.channels.come_back()

    # --- time

    async def advance(self, seconds: float) -> None:
        """Let so much of the fleet's time pass, and everybody act on what happens in it."""
        await self.time.advance(seconds)

    def advance_blocking(self, seconds: float) -> None:
        """The same from another thread than that of the clients' event loop."""
        asyncio.run_coroutine_threadsafe(self.advance(seconds), self.time.loop).result()

    # --- life

    def check(self) -> None:
        """Raise AssertionError if a request had no script, or one that could not be played."""
        if self.faults:
            raise AssertionError("; ".join(self.faults))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.check()

    # --- parts

    def _add(self, rule: Rule) -> Rule:
        self._rules.append(rule)
        return rule

    def _card(self, model: str, tasks: tuple[str, ...], handler: HandlerCard | None = None) -> Card:
        return Card(
            worker="scripted",
            queue=self.queue,
            model=model,
            tasks=tasks,
            handler=handler,
            limits=self._limits,
        )

    def _accept(self, request: MemoryRequest) -> None:
        self.asked.append(Asked(request))
        if self.cards:
            self._perform(request)

    def _perform(self, request: MemoryRequest) -> None:
        asked = request.envelope.request
        rule = next((rule for rule in self._rules if rule.suits(asked)), None)
        if rule is None:
            # Without the request's text, which may be private even here.
            place = len(self.asked)
            what = f"no rule for request {place} (asked[{place - 1}]), a {asked.kind} request"
            rule = Rule(asked.kind, ANYTHING, [End(state="failed", error=_failure(what))], 1, 0.0)
            self.faults.append(what)
        rule.left -= 1
        model = asked.model or self._start.model
        start = self._start.changed({"model": model})
        performance = Performance(
            self.memory, self.time, request, rule, start=start, fault=self.faults.append
        )
        self.time.call_at(self.time.time() + rule.queued_s, performance.begin)


def _failure(what: str) -> Failure:
    return Failure(code="generation_failed", message=what, details={"retryable": False})
