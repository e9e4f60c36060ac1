"""The one seam to Redis: a method per step of the protocol, each one script call for a whole batch.

Every script reads and checks all before it writes and may be repeated without harm, so a call whose reply
was lost is made again. What a worker writes is fenced: a write is refused unless the record still names
this worker, this entry and this epoch.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis import exceptions as redis_errors

from streamfleet_common import codec
from streamfleet_common.calls import TRANSIENT, Calls, batches
from streamfleet_common.cards import Card
from streamfleet_common.connections import BLOCK_MS, Connections
from streamfleet_common.deliveries import Delivery, Emission, Entry, Finish, NotStarted
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest, Undecodable
from streamfleet_common.frames import Frame
from streamfleet_common.keys import GROUP, QUEUES, Keys
from streamfleet_common.records import LETTERS, STATES, Record
from streamfleet_common.schemas import LANES, End, Failure, Lane, Start, State
from streamfleet_common.submissions import Submission, Submitted

MAX_QUEUE_DEPTH = 1024
"""How many requests a queue holds, accepted and unfinished, where no worker has said otherwise."""
CARD_LIFE_MS = 15_000
EXPIRE_AT_ONCE = 100
"""Requests that one call ends, so that others have their turn at Redis between two calls."""
_OWNER = re.compile(r"[^|\n]{1,200}")


@dataclass(frozen=True, slots=True)
class Depth:
    """Accepted and unfinished requests of a queue."""

    queued: int
    running: int
    limit: int
    dead: int

    @property
    def open(self) -> int:
        return self.queued + self.running


class Broker:
    """One shard of one queue in Redis; safe for concurrent use by coroutines of one event loop.

    Raises:
        BrokerUnavailable: by every method, when Redis cannot be reached or refuses to work. Scripts and plain
            questions are tried `calls.ATTEMPTS` times before that.
    """

    def __init__(
        self, connections: Connections, queue: str, *, shard: int = 0, script_flags: bool = True
    ) -> None:
        self.keys = Keys(queue, shard)
        self._connections = connections
        self._commands = connections.commands
        self._calls = Calls(connections, self.keys.tag, script_flags=script_flags)

    # --- the producer's steps

    async def submit(
        self, submissions: Sequence[Submission], *, max_queue_depth: int = MAX_QUEUE_DEPTH
    ) -> list[Submitted]:
        """Take requests in, or say why not. `max_queue_depth` counts only where no worker has set one."""
        items = []
        for submission in submissions:
            envelope = submission.envelope
            items.append(
                (
                    envelope.rid,
                    envelope.lane,
                    "s" if envelope.stream else "-",
                    envelope.deadline_ms,
                    envelope.result_ttl_ms,
                    envelope.tenant,
                    submission.digest,
                    submission.payload,
                )
            )
        outcomes: list[Submitted] = []
        for reply in await self._calls.script_in_batches("submit", [max_queue_depth], items):
            outcome = reply[0].decode()
            if outcome == "accepted":
                outcomes.append(Submitted("accepted", depth=reply[1]))
            elif outcome == "full":
                outcomes.append(Submitted("full", depth=reply[1], limit=reply[2]))
            else:
                outcomes.append(Submitted(outcome, state=_state(reply[1])))
        return outcomes

    async def cancel(self, rids: Sequence[str], tenant: str) -> list[State | None]:
        """Cancel open requests.

        Gives the state of each after the call: "cancelled", or the end it had already; None where the tenant
        has no such request.
        """
        error = Failure(code="cancelled", message="the request was cancelled")
        body = codec.encode(End(state="cancelled", error=error))
        states: list[State | None] = []
        for reply in await self._calls.script_in_batches("cancel", [tenant, body], [(rid,) for rid in rids]):
            outcome = reply[0].decode()
            if outcome == "ok":
                states.append("cancelled")
            else:
                states.append(_state(reply[1]) if outcome == "already" else None)
        return states

    async def status(self, rids: Sequence[str], tenant: str) -> list[Record | None]:
        """The records of requests; None where the tenant has no such request, or its result has expired."""
        names = [(self.keys.record(rid),) for rid in rids]
        raws: list[Any] = []
        for batch in batches(names):
            raws += await self._calls.ask(partial(self._commands.mget, [name for (name,) in batch]))
        records = [Record.parse(raw) if raw is not None else None for raw in raws]
        return [record if record and record.tenant == tenant else None for record in records]

    async def events(self, rid: str, after: str = "-") -> list[Frame]:
        """The logged frames of a streaming request behind the place `after` (`epoch-seq`); at most 1000."""
        first = after if after == "-" else f"({after}"
        entries: Any = await self._calls.ask(
            lambda: self._commands.xrange(self.keys.log(rid), min=first, count=1000)
        )
        return [Frame.parse(fields[b"f"]) for _, fields in entries]

    # --- the worker's steps

    async def create_groups(self) -> None:
        """Make the consumer groups, from the first entry on, so that nothing submitted earlier is missed."""
        for lane in LANES:
            await self._create_group(lane)

    async def _create_group(self, lane: Lane) -> None:
        try:
            await self._commands.xgroup_create(self.keys.lane(lane), GROUP, id="0", mkstream=True)
        except redis_errors.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise self._calls.unavailable(error) from error
        except TRANSIENT as error:
            raise self._calls.unavailable(error) from error

    async def read(
        self, owner: str, lanes: Sequence[Lane], count: int, *, block_ms: int | None
    ) -> list[Entry]:
        """Up to `count` new entries of each of `lanes`, in order of acceptance within a lane.

        Waits up to `block_ms`, at most `BLOCK_MS`, for the first; None or 0 does not wait. Never cancel it:
        what the server has given out by then would be lost until its lease runs out.
        """
        if count < 1 or not lanes:
            return []
        # Redis takes 0 for "for ever", and what comes after the socket's own limit is never seen.
        block_ms = min(block_ms, BLOCK_MS) if block_ms else None
        return await self._read(owner, lanes, ">", count, block_ms)

    async def given(self, owner: str) -> list[Entry]:
        """All entries given to this owner that have not ended, whether their reply arrived or not."""
        return await self._read(owner, LANES, "0", None, None)

    async def _read(
        self, owner: str, lanes: Sequence[Lane], after: str, count: int | None, block_ms: int | None
    ) -> list[Entry]:
        _check_owner(owner)
        streams: Mapping[Any, Any] = {self.keys.lane(lane): after for lane in lanes}
        try:
            replies: Any = await self._connections.reader.xreadgroup(
                GROUP, owner, dict(streams), count=count, block=block_ms
            )
        except redis_errors.ResponseError as error:
            # The streams vanished (flushed, or deleted by hand): make them again and carry on.
            if any(word in str(error) for word in ("NOGROUP", "UNBLOCKED", "WRONGTYPE")):
                await self.create_groups()
                return []
            raise self._calls.unavailable(error) from error
        except (redis_errors.RedisError, OSError) as error:
            raise self._calls.unavailable(error) from error
        by_stream: dict[bytes, Any] = dict(replies.items() if isinstance(replies, dict) else replies or [])
        entries: list[Entry] = []
        for lane in lanes:
            chunks = by_stream.get(self.keys.lane(lane).encode(), [])
            # RESP3 wraps the entries of a stream in one more list than RESP2 does.
            if chunks and isinstance(chunks[0], list):
                chunks = [entry for chunk in chunks for entry in chunk]
            for eid, fields in chunks:
                entries.append(_entry(eid.decode(), fields, lane))
        return entries

    async def start(self, owner: str, entries: Sequence[Entry], start: Start) -> list[Delivery | NotStarted]:
        """Begin entries that this owner has read; repeated, it gives the same epochs again.

        Raises:
            InvalidRequest: an owner whose name no record can hold.
        """
        _check_owner(owner)
        expired = Failure(code="deadline_exceeded", message="no worker was free before the deadline")
        head = [owner, codec.encode(start), codec.encode(End(state="expired", error=expired))]
        items = [(entry.rid, entry.eid, entry.lane) for entry in entries]
        started: list[Delivery | NotStarted] = []
        for entry, reply in zip(
            entries, await self._calls.script_in_batches("start", head, items), strict=True
        ):
            outcome = reply[0].decode()
            started.append(Delivery(entry, owner, *reply[1:]) if outcome == "ok" else outcome)
        return started

    async def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """Publish and log events. False where the request is no longer this worker's: it must fall silent."""
        items = [
            (
                emission.delivery.entry.rid,
                emission.delivery.fence,
                emission.tenant,
                f"{emission.delivery.epoch}-{emission.seq}",
                emission.body,
            )
            for emission in emissions
        ]
        return [reply == b"ok" for reply in await self._calls.script_in_batches("emit", [], items)]

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        """End requests. False where the end was not this worker's to write, or somebody wrote one before.

        A repetition after a lost reply is True again. An end over `MAX_RESULT_BYTES`, which no reader would
        take, is replaced by a failure that says so.
        """
        items = []
        for finish in finishes:
            delivery, end = finish.delivery, finish.end
            body = codec.encode(end)
            if len(body) > codec.MAX_RESULT_BYTES:
                end = _too_large(end, len(body))
                body = codec.encode(end)
            items.append((delivery.entry.rid, delivery.fence, LETTERS[end.state], body))
        return [reply[0] == b"ok" for reply in await self._calls.script_in_batches("finish", [], items)]

    async def expire(self) -> int:
        """End all requests whose deadline has passed, in any state; gives how many."""
        late = Failure(code="deadline_exceeded", message="not answered before its deadline")
        body = codec.encode(End(state="expired", error=late))
        ended = 0
        while True:
            bite: int = await self._calls.script("expire", [body, EXPIRE_AT_ONCE])
            ended += bite
            if bite < EXPIRE_AT_ONCE:
                return ended

    async def announce(self, card: Card, *, life_ms: int = CARD_LIFE_MS) -> None:
        """Show a worker's card for `life_ms`; 0 takes it down."""
        args = [card.worker, codec.encode(card), life_ms, card.limits.max_queue_depth]
        now = await self._calls.script("announce", args)
        try:
            await self._calls.ask(lambda: self._commands.hset(QUEUES, self.keys.queue, str(now)))
        except BrokerUnavailable as error:
            # The card itself is shown. A full Redis refuses a plain command, and knows the name since long.
            if error.details.get("reason") != "out_of_memory":
                raise

    # --- what anybody may ask

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
            for lane in LANES:
                pipe.xpending(self.keys.lane(lane), GROUP)
            return pipe.execute(raise_on_error=False)

        open_, limit, dead, *pending = await self._calls.ask(ask)
        for value in (open_, limit, dead):
            if isinstance(value, Exception):
                raise self._calls.unavailable(value) from value
        # A lane that nobody has written to yet has no group, and nothing pending.
        running = sum(lane["pending"] for lane in pending if isinstance(lane, dict))
        running = min(running, open_)
        return Depth(open_ - running, running, int(limit or MAX_QUEUE_DEPTH), dead)

    async def ping(self) -> None:
        await self._calls.ask(self._commands.ping)


def _check_owner(owner: str) -> None:
    # It becomes a field of the record, and the record's fields are split at bars.
    if not _OWNER.fullmatch(owner):
        raise InvalidRequest(
            f"{owner[:200]!r} cannot name a worker: take 1 to 200 characters, no line feed and no '|'"
        )


def _too_large(end: End, size: int) -> End:
    error = Failure(
        code="generation_failed",
        message=f"the result of {size} bytes is over max_result_bytes ({codec.MAX_RESULT_BYTES}): "
        "ask for fewer tokens, choices or log-probabilities",
        details={"retryable": False},
    )
    return end.model_copy(
        update={"state": "failed", "error": error, "choices": (), "prefill": None, "of": 0, "last_seq": 0}
    )


def _state(letter: bytes) -> State:
    try:
        return STATES[letter.decode()]
    except (KeyError, UnicodeDecodeError):
        raise Undecodable("not a request's record: was the key written by hand?") from None


def _entry(eid: str, fields: Mapping[bytes, bytes] | None, lane: Lane) -> Entry:
    rid = (fields or {}).get(b"r", b"")
    return Entry(rid.decode("ascii", "replace"), eid, lane, (fields or {}).get(b"p", b""))
