"""The producer's steps of the protocol, and what anybody may ask."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, cast

from streamfleet_common import codec
from streamfleet_common.calls import batches
from streamfleet_common.cards import Card
from streamfleet_common.depth import MAX_QUEUE_DEPTH, Depth
from streamfleet_common.errors import InvalidRequest, Undecodable
from streamfleet_common.frames import Frame
from streamfleet_common.keys import GROUP, LETTERS, QUEUES
from streamfleet_common.records import STATES, Record
from streamfleet_common.schemas import End, Failure, State
from streamfleet_common.steps import Steps
from streamfleet_common.submissions import Refused, Submission, Submitted


class ProducerSteps(Steps):
    """Submit, cancel, ask."""

    async def submit(
        self, submissions: Sequence[Submission], *, max_queue_depth: int = MAX_QUEUE_DEPTH
    ) -> list[Submitted]:
        """Take requests in, or say why not. `max_queue_depth` counts only where no worker has set one.

        Raises:
            BrokerUnavailable: `reason="not_durable"` where durability asks for a confirmation, and none came.
                The requests may be in all the same: submit them again with the same ids.
        """
        items = []
        for submission in submissions:
            envelope = submission.envelope
            items.append(
                (envelope.rid, envelope.deadline_ms, _about(submission), submission.payload),
            )
        replies = await self._calls.script_in_batches("submit", [max_queue_depth], items, durable=True)
        return [
            _submitted(reply, submission.tokens)
            for submission, reply in zip(submissions, replies, strict=True)
        ]

    async def cancel(self, rids: Sequence[str], tenant: str) -> list[State | None]:
        """Cancel open requests.

        Gives the state of each after the call: "cancelled", or the end it had already; None where the tenant
        has no such request.
        """
        error = Failure(code="cancelled", message="the request was cancelled")
        body = codec.encode(End(state="cancelled", error=error))
        states: list[State | None] = []
        for reply in await self._calls.script_in_batches("cancel", [tenant, body], [(rid,) for rid in rids]):
            outcome, _, letter = reply.partition(b"|")
            if outcome == b"ok":
                states.append("cancelled")
            else:
                states.append(_state(letter) if letter else None)
        return states

    async def status(self, rids: Sequence[str], tenant: str) -> list[Record | None]:
        """The records of requests; None where the tenant has no such request, or its result has expired."""
        names = [(self.keys.record(rid),) for rid in rids]
        raws: list[Any] = []
        for batch in batches(names):
            raws += await self._calls.command("MGET", *(name for (name,) in batch))
        records = [Record.parse(raw) if raw is not None else None for raw in raws]
        return [record if record and record.tenant == tenant else None for record in records]

    async def events(self, rid: str, after: str = "-") -> list[Frame]:
        """The logged frames of a streaming request behind the place `after` (`epoch-seq`); at most 1000."""
        first = after if after == "-" else f"({after}"
        entries: Any = await self._calls.ask(
            lambda: self._commands.xrange(self.keys.log(rid), min=first, count=1000)
        )
        return [Frame.parse(fields[b"f"]) for _, fields in entries]

    # --- the fleet

    async def cards(self) -> list[Card]:
        """The cards of the workers that live now; one that cannot be read (of a far version) is left out."""

        def ask() -> Awaitable[Any]:
            # Made anew for each attempt: a pipeline is empty once it has run, even in vain.
            pipe = self._commands.pipeline(transaction=False)
            pipe.time()
            pipe.hgetall(self.keys.workers)
            return pipe.execute()

        (seconds, micros), raws = await self._calls.ask(ask)
        now_ms = seconds * 1000 + micros // 1000
        cards = []
        for raw in raws.values():
            until, _, data = raw.partition(b"|")
            if not until.isdigit() or int(until) < now_ms:
                continue
            try:
                cards.append(codec.decode_card(data))
            except InvalidRequest:
                continue
        return sorted(cards, key=lambda card: card.worker)

    async def queues(self) -> list[str]:
        """Every queue that a worker has ever announced, by name."""
        names: list[Any] = await self._calls.ask(lambda: self._commands.hkeys(QUEUES))
        return sorted(name.decode("utf-8", "replace") for name in names)

    async def depth(self) -> Depth:
        """How deep the queue is. A request counts as running once a worker has read it."""

        def ask() -> Awaitable[list[Any]]:
            pipe = self._commands.pipeline(transaction=False)
            pipe.zcard(self.keys.open)
            pipe.hget(self.keys.control, "max_queue_depth")
            pipe.xlen(self.keys.dead)
            return pipe.execute(raise_on_error=False)

        pending = await self._ask_streams(lambda pipe, name: pipe.xpending(name, GROUP))
        open_, limit, dead = await self._calls.ask(ask)
        for value in (open_, limit, dead):
            if isinstance(value, Exception):
                raise self._calls.unavailable(value) from value
        # A stream that nobody has written to yet has no group, and nothing pending.
        running = sum(found["pending"] for _, _, found in pending if isinstance(found, dict))
        running = min(running, open_)
        return Depth(open_ - running, running, int(limit or MAX_QUEUE_DEPTH), dead)

    async def ping(self) -> None:
        await self._calls.ask(self._commands.ping)


def _about(submission: Submission) -> str:
    """What the record shall say of a request; see `lua/submit.lua`."""
    envelope = submission.envelope
    retry = envelope.retry
    return (
        f"{LETTERS[envelope.lane]}|{'s' if envelope.stream else '-'}|{envelope.result_ttl_ms}"
        f"|{retry.attempts or 0}.{retry.backoff_ms}.{'f' if envelope.on_restart == 'fail' else 'r'}"
        f"|{submission.tokens}|{envelope.tenant}|{submission.digest}"
    )


def _submitted(reply: bytes, tokens: int) -> Submitted:
    outcome, _, rest = reply.partition(b"|")
    if outcome == b"accepted":
        return Submitted("accepted", depth=int(rest))
    if outcome == b"full":
        depth, limit, reason, retry_after_ms = rest.decode().split("|")
        return Submitted(
            "full",
            depth=int(depth),
            limit=int(limit),
            reason=cast("Refused", reason),
            retry_after_s=int(retry_after_ms) / 1000,
            tokens=tokens,
        )
    return Submitted("duplicate" if outcome == b"duplicate" else "conflict", state=_state(rest))


def _state(letter: bytes) -> State:
    try:
        return STATES[letter.decode()]
    except (KeyError, UnicodeDecodeError):
        raise Undecodable("not a request's record: was the key written by hand?") from None
