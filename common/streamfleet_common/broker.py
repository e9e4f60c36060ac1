"""The one seam to Redis: a method per step of the protocol, each one script call for a whole batch.

Every script reads and checks all before it writes and may be repeated without harm, so a call whose reply
was lost is made again. What a worker writes is fenced: a write is refused unless the record still names
this worker, this entry and this epoch.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from redis import exceptions as redis_errors

from streamfleet_common import codec
from streamfleet_common.connections import BLOCK_MS, Connections, redacted
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest, Undecodable
from streamfleet_common.frames import Frame
from streamfleet_common.keys import GROUP, QUEUES, Keys
from streamfleet_common.records import LETTERS, STATES, Record
from streamfleet_common.schemas import (
    LANES,
    Card,
    End,
    Envelope,
    Failure,
    Lane,
    Start,
    State,
)
from streamfleet_common.scripts import Script, ScriptName

MAX_QUEUE_DEPTH = 1024
"""How many requests a queue holds, accepted and unfinished, where no worker has said otherwise."""
ATTEMPTS = 3
BACKOFF_S = 0.1
CARD_LIFE_MS = 15_000
EXPIRE_AT_ONCE = 100
BATCH = 512
"""Requests in one script call: Lua can unpack some 8,000 values, and other clients wait meanwhile."""
BATCH_BYTES = 8 * 1024 * 1024
"""Payload in one script call; Redis cuts off a client that sends more than 1 GB at once."""
_OWNER = re.compile(r"[^|\n]{1,200}")

_T = TypeVar("_T")
_TRANSIENT = (redis_errors.ConnectionError, redis_errors.TimeoutError, redis_errors.BusyLoadingError, OSError)


@dataclass(frozen=True, slots=True)
class Submission:
    """A request ready to be accepted: its envelope, and the bytes made of it.

    `digest` says whether two submissions of one id ask for the same thing.
    """

    envelope: Envelope
    payload: bytes
    digest: str

    @classmethod
    def of(cls, envelope: Envelope, limit: int = codec.MAX_REQUEST_BYTES) -> Submission:
        """Encode an envelope.

        Raises:
            Undecodable: the request is over `limit` bytes.
        """
        payload, digest = codec.encode_envelope(envelope)
        if len(payload) > limit:
            raise Undecodable(
                f"request of {len(payload)} bytes is over max_request_bytes ({limit}): send less",
                bytes=len(payload),
                limit=limit,
            )
        return cls(envelope, payload, digest)


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a submission. `depth` is the queue's depth after it, `limit` set when it is full."""

    outcome: Literal["accepted", "duplicate", "conflict", "full"]
    state: State = "queued"
    depth: int = 0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a work stream, as read: not yet started. `rid` is "" if it is none of ours."""

    rid: str
    eid: str
    lane: Lane
    payload: bytes


@dataclass(frozen=True, slots=True)
class Delivery:
    """A request claimed by this worker in one epoch. Times are server ms."""

    entry: Entry
    owner: str
    epoch: int
    now_ms: int
    accepted_at_ms: int
    deadline_at_ms: int
    attempts: int
    crashes: int

    @property
    def key(self) -> tuple[str, int]:
        return (self.entry.rid, self.epoch)

    @property
    def fence(self) -> str:
        """What the record must say for this worker's writes to count."""
        return f"|{self.epoch}|{self.entry.eid}|{self.owner}|"


NotStarted = Literal["gone", "lost", "expired", "stray"]


@dataclass(frozen=True, slots=True)
class Emission:
    """An event of a running request. Without a body the fence alone is checked."""

    delivery: Delivery
    tenant: str
    seq: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a running request."""

    delivery: Delivery
    end: End


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
            questions are tried `ATTEMPTS` times before that.
    """

    def __init__(
        self, connections: Connections, queue: str, *, shard: int = 0, script_flags: bool = True
    ) -> None:
        self.keys = Keys(queue, shard)
        self._connections = connections
        self._commands = connections.commands
        names: tuple[ScriptName, ...] = (
            "submit",
            "start",
            "emit",
            "finish",
            "cancel",
            "expire",
            "announce",
        )
        self._scripts = {name: Script.load(name, flags=script_flags) for name in names}

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
        for reply in await self._call_in_batches("submit", [max_queue_depth], items):
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
        for reply in await self._call_in_batches("cancel", [tenant, body], [(rid,) for rid in rids]):
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
        for batch in _batches(names):
            raws += await self._ask(partial(self._commands.mget, [name for (name,) in batch]))
        records = [Record.parse(raw) if raw is not None else None for raw in raws]
        return [record if record and record.tenant == tenant else None for record in records]

    async def events(self, rid: str, after: str = "-") -> list[Frame]:
        """The logged frames of a streaming request behind the place `after` (`epoch-seq`); at most 1000."""
        first = after if after == "-" else f"({after}"
        entries: Any = await self._ask(
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
                raise self._unavailable(error) from error
        except _TRANSIENT as error:
            raise self._unavailable(error) from error

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
            raise self._unavailable(error) from error
        except (redis_errors.RedisError, OSError) as error:
            raise self._unavailable(error) from error
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
        for entry, reply in zip(entries, await self._call_in_batches("start", head, items), strict=True):
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
        return [reply == b"ok" for reply in await self._call_in_batches("emit", [], items)]

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
        return [reply[0] == b"ok" for reply in await self._call_in_batches("finish", [], items)]

    async def expire(self) -> int:
        """End requests whose deadline has passed, in any state, at most `EXPIRE_AT_ONCE`; gives how many."""
        late = Failure(code="deadline_exceeded", message="not answered before its deadline")
        body = codec.encode(End(state="expired", error=late))
        ended: int = await self._call("expire", [body, EXPIRE_AT_ONCE])
        return ended

    async def announce(self, card: Card, *, life_ms: int = CARD_LIFE_MS) -> None:
        """Show a worker's card for `life_ms`; 0 takes it down."""
        args = [card.worker, codec.encode(card), life_ms, card.limits.max_queue_depth]
        now = await self._call("announce", args)
        try:
            await self._ask(lambda: self._commands.hset(QUEUES, self.keys.queue, str(now)))
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

        (seconds, micros), raws = await self._ask(ask)
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
        names: list[Any] = await self._ask(lambda: self._commands.hkeys(QUEUES))
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

        open_, limit, dead, *pending = await self._ask(ask)
        for value in (open_, limit, dead):
            if isinstance(value, Exception):
                raise self._unavailable(value) from value
        # A lane that nobody has written to yet has no group, and nothing pending.
        running = sum(lane["pending"] for lane in pending if isinstance(lane, dict))
        running = min(running, open_)
        return Depth(open_ - running, running, int(limit or MAX_QUEUE_DEPTH), dead)

    async def ping(self) -> None:
        await self._ask(self._commands.ping)

    # --- calls

    async def _call_in_batches(
        self, name: ScriptName, head: Sequence[Any], items: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """One reply an item. If a later batch fails, the earlier ones stand; the whole may be repeated."""
        replies: list[Any] = []
        for batch in _batches(items):
            args = [*head]
            for item in batch:
                args += item
            replies += await self._call(name, args)
        return replies

    async def _call(self, name: ScriptName, args: Sequence[Any]) -> Any:
        script = self._scripts[name]
        return await self._ask(lambda: script.call(self._commands, self.keys.tag, args))

    async def _ask(self, command: Callable[[], Awaitable[_T]]) -> _T:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await command()
            except _TRANSIENT as error:
                if isinstance(error, redis_errors.AuthenticationError) or attempt == ATTEMPTS:
                    raise self._unavailable(error) from error
                # Full jitter, so that a fleet does not come back all at once.
                await asyncio.sleep(random.uniform(0, BACKOFF_S * 2**attempt))
            except redis_errors.RedisError as error:
                raise self._unavailable(error) from error
        raise AssertionError("unreachable")

    def _unavailable(self, error: Exception) -> BrokerUnavailable:
        where = redacted(self._connections.url)
        if isinstance(error, redis_errors.OutOfMemoryError):
            return BrokerUnavailable(
                f"Redis at {where} is out of memory and takes no more requests: "
                "wait for running ones to end, or raise its maxmemory",
                reason="out_of_memory",
            )
        if isinstance(error, (redis_errors.AuthenticationError, redis_errors.NoPermissionError)):
            return BrokerUnavailable(
                f"Redis at {where} refuses this user: check the name, password and ACL in the URL",
                reason="forbidden",
            )
        if isinstance(error, redis_errors.ReadOnlyError):
            return BrokerUnavailable(
                f"Redis at {where} is a read-only replica: point the URL at the primary",
                reason="read_only",
            )
        if isinstance(error, _TRANSIENT):
            return BrokerUnavailable(
                f"Redis at {where} cannot be reached ({type(error).__name__}: {error}): "
                "is it running, and is the URL right? `streamfleet up` starts one here",
                reason="unreachable",
            )
        return BrokerUnavailable(
            f"Redis at {where} refused a command ({error}): is it Redis 7.0 or newer, or Valkey 8 or newer?",
            reason="refused",
        )


def _batches(items: Sequence[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    batch: list[tuple[Any, ...]] = []
    size = 0
    for item in items:
        bytes_ = sum(len(value) for value in item if isinstance(value, bytes))
        if batch and (len(batch) == BATCH or size + bytes_ > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += bytes_
    if batch:
        yield batch


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
