"""The worker's steps of the protocol.

What a worker writes is fenced: a write is refused unless the record still names this worker, this place and
this epoch.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from streamfleet_common import codec
from streamfleet_common.calls import BATCH, batches, is_gone
from streamfleet_common.connections import BLOCK_MS
from streamfleet_common.deliveries import (
    Bill,
    Delivery,
    Emission,
    Entry,
    Finish,
    NotStarted,
    Renewal,
    Taken,
)
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest
from streamfleet_common.keys import GROUP, LANE_STREAMS, LETTERS, Stream, parse_place, place_of
from streamfleet_common.records import LETTERS as STATE_LETTERS
from streamfleet_common.schemas import End, Failure, Start
from streamfleet_common.steps import SUB_LANE_FIELDS, Steps, sub_lanes_of

RENEW_BUDGET_S = 2.0
"""A renewal that is not answered by then is made anew, with what is held by then."""
MAX_GIVEN = 1000
"""Of each stream; the rest is found by the next look."""
_OWNER = re.compile(r"[^|\n]{1,200}")


class WorkerSteps(Steps):
    """Read, start, renew, emit, finish, release."""

    async def create_groups(self) -> None:
        """Make the consumer groups, from the first entry on, so that nothing submitted earlier is missed."""
        counts: Any = await self._calls.ask(
            lambda: self._commands.hmget(self.keys.control, [*SUB_LANE_FIELDS])
        )
        self._sub_lanes = sub_lanes_of(counts)
        for stream, number in self._streams():
            await self._create_group(self.keys.stream(stream, number))

    async def _create_group(self, name: str) -> None:
        try:
            await self._calls.ask(lambda: self._commands.xgroup_create(name, GROUP, id="0", mkstream=True))
        except BrokerUnavailable as error:
            if "BUSYGROUP" not in str(error.__cause__):
                raise

    async def read(
        self, owner: str, streams: Sequence[Stream], count: int, *, block_ms: int | None
    ) -> list[Entry]:
        """Up to `count` new entries of each of `streams`, in order of acceptance within a stream.

        Waits up to `block_ms`, at most `BLOCK_MS`, for the first; None or 0 does not wait. Never cancel it:
        what the server has given out by then would be lost until its lease runs out.
        """
        if count < 1 or not streams:
            return []
        # Redis takes 0 for "for ever", and what comes after the socket's own limit is never seen.
        block_ms = min(block_ms, BLOCK_MS) if block_ms else None
        return await self._read(owner, streams, count, block_ms)

    async def given(self, owner: str, *, known: Collection[str] = ()) -> list[Entry]:
        """What was given to this owner and has not ended, whether the reply arrived or not.

        Places that are `known` are left out, so that nothing is read twice; nobody's lease is renewed by it.
        An entry that is there no more has no rid.
        """
        _check_owner(owner)
        pending = await self._ask_streams(
            lambda pipe, name: pipe.xpending_range(name, GROUP, "-", "+", MAX_GIVEN, owner)
        )
        places: list[tuple[Stream, int, str]] = []
        for stream, number, found in pending:
            # A stream that nobody has written to yet has no group, and nothing pending.
            for entry in found if isinstance(found, list) else ():
                eid = entry["message_id"].decode()
                if place_of(stream, eid, number) not in known:
                    places.append((stream, number, eid))
        if not places:
            return []

        def bodies() -> Awaitable[list[Any]]:
            pipe = self._commands.pipeline(transaction=False)
            for stream, number, eid in places:
                pipe.xrange(self.keys.stream(stream, number), eid, eid)
            return pipe.execute()

        return [
            _entry(eid, found[0][1] if found else None, stream, number)
            for (stream, number, eid), found in zip(places, await self._calls.ask(bodies), strict=True)
        ]

    async def _read(
        self, owner: str, streams: Sequence[Stream], count: int, block_ms: int | None
    ) -> list[Entry]:
        _check_owner(owner)
        block = () if block_ms is None else ("BLOCK", block_ms)
        places = [
            (stream, number)
            for stream in streams
            for number in range(self._sub_lanes if stream in LANE_STREAMS else 1)
        ]
        names = [self.keys.stream(stream, number) for stream, number in places]
        ids = [">"] * len(names)
        try:
            replies = await self._calls.once(
                self._connections.reader,
                *("XREADGROUP", "GROUP", GROUP, owner, "COUNT", count, *block, "STREAMS", *names, *ids),
            )
        except BrokerUnavailable as error:
            if not is_gone(error):
                raise
            # The streams vanished (flushed, or deleted by hand): make them again and carry on.
            await self.create_groups()
            return []
        # RESP3 has a map where RESP2 has pairs.
        by_stream: dict[bytes, Any] = dict(replies.items() if isinstance(replies, dict) else replies or [])
        return [
            _entry(eid.decode(), fields, stream, number)
            for (stream, number), name in zip(places, names, strict=True)
            for eid, fields in by_stream.get(name.encode(), ())
        ]

    async def start(self, owner: str, entries: Sequence[Entry], start: Start) -> list[Delivery | NotStarted]:
        """Begin entries that this owner has read; repeated, it gives the same epochs again.

        Raises:
            InvalidRequest: an owner whose name no record can hold.
        """
        items = [(entry.rid, entry.place) for entry in entries]
        started: list[Delivery | NotStarted] = []
        for batch in batches(items):
            args = _start_args(owner, start, 0, (), batch)
            _, now, self._sub_lanes, *replies = await self._calls.script("start", args)
            for outcome in replies[3::4]:
                started.append(_started(entries[len(started)], owner, int(now), outcome))
        return started

    async def take(
        self,
        owner: str,
        start: Start,
        *,
        streams: Sequence[Stream],
        count: int,
        entries: Sequence[Entry] = (),
    ) -> Taken:
        """Begin `entries` that were read, and up to `count` new ones of `streams`, in this order.

        At most `BATCH` of each: a caller with more room looks again. Does not wait. Of suspects ("solo") it
        takes one, and then nothing else. If the reply is lost, `given` knows what was taken.

        Raises:
            InvalidRequest: an owner whose name no record can hold.
        """
        entries = entries[:BATCH]
        items = [(entry.rid, entry.place) for entry in entries]
        args = _start_args(owner, start, min(count, BATCH), streams, items)
        make_room, now, self._sub_lanes, *replies = await self._calls.script("start", args)
        now_ms = int(now)
        started: list[tuple[Entry, Delivery | NotStarted]] = []
        for place, rid, payload, outcome in zip(*[iter(replies)] * 4, strict=True):
            entry = entries[len(started)] if place is None else _entry_at(place.decode(), rid, payload)
            started.append((entry, _started(entry, owner, now_ms, outcome)))
        return Taken(started, bool(make_room))

    async def renew(self, owner: str, deliveries: Sequence[Delivery]) -> Renewal:
        """Keep the leases of running requests, over a connection that nothing else can hold up."""
        items = [(delivery.entry.rid, delivery.fence) for delivery in deliveries]
        ours: list[bool] = []
        drain = False
        for batch in list(batches(items)) or [[]]:
            drains, *replies = await self._calls.script(
                "renew",
                [owner, *chain.from_iterable(batch)],
                client=self._connections.leases,
                budget_s=RENEW_BUDGET_S,
            )
            drain = drain or bool(drains)
            ours += [reply == b"ok" for reply in replies]
        return Renewal(ours, drain)

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

    async def finish(self, finishes: Sequence[Finish], bills: Sequence[Bill] = ()) -> list[bool]:
        """End requests, and tell the tokens of others that had been ended already.

        Gives an outcome for each of `finishes`: False where the end was not this worker's to write, or
        somebody wrote one before.

        One to be tried again goes back to the queue instead, after `retry_after_ms` or else its backoff,
        unless its policy forbids it, and `went_back` of its finish is true from then on.

        A request that was cancelled, or swept away as overdue, while this worker ran it is charged to its
        tenant all the same, by a finish that comes too late or by a bill: once, however often it is told, and
        only as long as its record is there.

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
            letter = STATE_LETTERS[end.state]
            if finish.retry:
                letter = "T" if finish.retry_after_ms is None else f"T{finish.retry_after_ms}"
            spent = f"{end.usage.prompt_tokens}|{end.usage.completion_tokens}"
            items.append((delivery.entry.rid, delivery.fence, letter, body, spent))
        for bill in bills:
            spent = f"{bill.prompt_tokens}|{bill.completion_tokens}"
            items.append((bill.rid, bill.fence, "B", b"", spent))
        replies = await self._calls.script_in_batches("finish", [], items, client=self._connections.leases)
        replies = replies[: len(finishes)]
        for finish, reply in zip(finishes, replies, strict=True):
            finish.went_back = reply == b"again"
        return [reply in (b"ok", b"again") for reply in replies]

    async def release(self, held: Sequence[Delivery | Entry]) -> list[bool]:
        """Give back what was begun, or only read; it goes before the newcomers of its lane.

        Nothing is counted against it. One that may not be begun again (its policy says so, or it asked to
        fail rather than begin its text anew) ends as failed. False where it was not this worker's any more.
        """
        body = _failed("its worker stopped before the answer was complete: send it again", retryable=True)
        items = []
        for one in held:
            entry, fence = (one.entry, one.fence) if isinstance(one, Delivery) else (one, "")
            items.append((entry.rid, entry.place, fence))
        return [reply == b"ok" for reply in await self._calls.script_in_batches("release", [body], items)]


def _check_owner(owner: str) -> None:
    # It becomes a field of the record, and the record's fields are split at bars.
    if not _OWNER.fullmatch(owner):
        raise InvalidRequest(
            f"{owner[:200]!r} cannot name a worker: take 1 to 200 characters, no line feed and no '|'"
        )


def _start_args(
    owner: str, start: Start, count: int, streams: Sequence[Stream], items: Sequence[tuple[Any, ...]]
) -> list[Any]:
    _check_owner(owner)
    letters = "".join(LETTERS[stream] for stream in streams)
    return [owner, codec.encode(start), _EXPIRED, count, letters, *chain.from_iterable(items)]


def _started(entry: Entry, owner: str, now_ms: int, outcome: bytes) -> Delivery | NotStarted:
    word, *numbers = outcome.decode().split("|")
    if word != "ok":
        return cast("NotStarted", word)
    epoch, accepted, deadline, attempts, crashes = map(int, numbers)
    return Delivery(entry, owner, epoch, now_ms, accepted, deadline, attempts, crashes)


def _entry_at(place: str, rid: bytes, payload: bytes) -> Entry:
    stream, number, eid = parse_place(place)
    return Entry(rid.decode("ascii", "replace"), eid, stream, payload, number)


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


def _entry(
    eid: str, fields: Mapping[bytes, bytes] | list[bytes] | None, stream: Stream, sub_lane: int
) -> Entry:
    if isinstance(fields, list):
        # As the server sends them: each followed by its value.
        fields = dict(zip(fields[::2], fields[1::2], strict=True))
    rid = (fields or {}).get(b"r", b"")
    return Entry(rid.decode("ascii", "replace"), eid, stream, (fields or {}).get(b"p", b""), sub_lane)


def _failed(message: str, *, retryable: bool) -> bytes:
    error = Failure(code="generation_failed", message=message, details={"retryable": retryable})
    return codec.encode(End(state="failed", error=error))


_EXPIRED = codec.encode(
    End(
        state="expired",
        error=Failure(code="deadline_exceeded", message="no worker was free before the deadline"),
    )
)
