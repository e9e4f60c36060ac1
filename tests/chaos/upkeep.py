"""What is promised about the queue as a whole (I6 to I9 and I11 to I13), looked for in a history."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from chaos.history import WORK_STREAMS, History
from streamfleet_common.schemas import End, Start

MAX_SOLO = 2
SWEEPS = 4
"""So often within a lease every worker sweeps, give or take three tenths."""
SLACK_MS = 1500.0
"""How late a sweep may come, and be seen, on a machine that has other work too."""
FOR_EVER = frozenset({"sweep", "control", "workers", "dead", *(f"s:{name}" for name in WORK_STREAMS)})
"""Keys of a queue that stay."""

Broken = Iterator[tuple[str, str]]


def entries_are_open(history: History) -> Broken:
    """I6: each open request has one entry, or waits for its next try; at the end nothing is left."""
    for glimpse in history.glimpses:
        if glimpse.waiting + glimpse.later != glimpse.open:
            waiting = f"{glimpse.waiting} entries and {glimpse.later} in backoff"
            yield "", f"at {glimpse.at_ms} {glimpse.open} requests were open, with {waiting}"
    remains = history.remains
    for rid in remains.open:
        yield rid, "still open at the end"
    for name, stream in remains.streams.items():
        if stream.length or stream.pending:
            yield "", f"stream {name} keeps {stream.length} entries, {stream.pending} of them pending"
    if remains.later:
        yield "", f"{remains.later} requests still wait for their next try"
    for rid, record in remains.records.items():
        if record.end is None and rid not in remains.open:
            yield rid, f"{record.state}, but not open"
    yield from _counts(history)


def _counts(history: History) -> Broken:
    """No tenant counts for anything that has ended, and its ledger knows each of its ends once."""
    remains = history.remains
    for tenant, count in remains.tenants.items():
        if count:
            yield "", f"tenant {tenant!r} still counts {count}"
    ended = Counter(record.tenant for record in remains.records.values() if record.end is not None)
    for tenant in sorted({*ended, *remains.booked}):
        if ended[tenant] != remains.booked.get(tenant, 0):
            told = remains.booked.get(tenant, 0)
            yield "", f"{ended[tenant]} requests of tenant {tenant!r} have ended, its ledger says {told}"
    yield from _charges(history)


def _charges(history: History) -> Broken:
    """Each tenant pays for what its ends tell, and for what others had ended no more than the whole of it."""
    remains = history.remains
    least, most = Counter[str](), Counter[str]()
    for rid, record in remains.records.items():
        if record.end is None:
            continue
        end = record.end.event()
        assert isinstance(end, End)
        told = end.usage.completion_tokens
        least[record.tenant] += told
        is_billed = record.state in ("cancelled", "expired") and not told
        most[record.tenant] += history.orders[rid].count if is_billed and rid in history.orders else told
    for tenant in sorted({*most, *remains.charged}):
        charged = remains.charged.get(tenant, 0)
        if not least[tenant] <= charged <= most[tenant]:
            wanted = f"{least[tenant]} to {most[tenant]}"
            yield "", f"tenant {tenant!r} is charged with {charged} tokens, where {wanted} were computed"


def limits_are_kept(history: History) -> Broken:
    """I7: the queue is never deeper than its limit, and each request is accepted once."""
    for glimpse in history.glimpses:
        if glimpse.open > glimpse.limit:
            yield "", f"at {glimpse.at_ms} {glimpse.open} requests were open, {glimpse.limit} are allowed"
    taken: dict[str, str] = {}
    for reply in sorted(history.replies, key=lambda reply: reply.at):
        order = history.orders.get(reply.rid)
        digest = taken.get(reply.rid) or (order.digest if order is not None else reply.digest)
        if reply.outcome == "accepted":
            if reply.rid in taken:
                yield reply.rid, "accepted twice"
            taken[reply.rid] = reply.digest
        elif reply.outcome == "duplicate" and reply.digest != digest:
            yield reply.rid, "another request under the same id was called a duplicate"
        elif reply.outcome == "conflict" and reply.digest == digest:
            yield reply.rid, "the same request was called a conflict"


def crashes_are_losses(history: History) -> Broken:
    """I8: crashes count owners that were lost while they ran it, and nothing else."""
    lost = {loss.worker for loss in history.losses}
    starts = _starts(history)
    for rid, record in history.remains.records.items():
        known = starts.get(rid, {})
        most = sum(worker in lost for worker in known.values())
        if lost:  # an attempt that nobody saw may have been one of theirs
            most += max(0, record.attempts - len(known))
        if record.crashes > most:
            yield (
                rid,
                f"{record.crashes} crashes, at most {most} of its {record.attempts} workers were lost",
            )
        if record.solo_losses > record.crashes:
            yield rid, f"{record.solo_losses} losses while alone, but {record.crashes} crashes"


def only_poison_dies(history: History) -> Broken:
    """I9: who is dead was lost alone often enough, and is guilty; who is guilty is dead."""
    buried = Counter(letter.get("rid", "") for letter in history.remains.dead)
    unlucky = innocents(history)
    for rid, record in history.remains.records.items():
        order = history.orders.get(rid)
        if record.state != "dead":
            if rid in buried:
                yield rid, f"in the dead letters, but {record.state}"
            if order is not None and order.is_poison and record.state == "done":
                yield rid, "poison, but done"
            continue
        if record.solo_losses < MAX_SOLO:
            yield rid, f"dead after {record.solo_losses} losses while alone"
        if buried[rid] != 1:
            yield rid, f"dead, with {buried[rid]} dead letters"
        if rid in unlucky and not unlucky[rid]:
            yield rid, "dead, but no poison, and no fault of ours explains it"


def innocents(history: History) -> dict[str, bool]:
    """The dead that are no poison: whether random losses of ours, `MAX_SOLO` of them, explain it."""
    ours = {loss.worker for loss in history.losses if loss.cause != "poison"}
    starts = _starts(history)
    found = {}
    for rid, order in history.orders.items():
        record = history.remains.record(rid)
        if record is not None and record.state == "dead" and not order.is_poison:
            known = starts.get(rid, {})
            hit = sum(worker in ours for worker in known.values())
            unseen = max(0, record.attempts - len(known)) if ours else 0
            found[rid] = hit + unseen >= MAX_SOLO
    return found


def recovery_is_prompt(history: History) -> Broken:
    """I11: what a lost worker ran is taken from it within N, and one lease more for each outage."""
    bound_ms = history.lease_ms * (1 + 1.3 / SWEEPS) + SLACK_MS
    for loss in history.losses:
        if not loss.is_watched:
            continue
        limit_ms = bound_ms + loss.outages * history.lease_ms + (history.outage_ms if loss.outages else 0)
        for rid, epoch in loss.held.items():
            took_ms = loss.freed_ms.get(rid)
            if took_ms is None:
                yield rid, f"epoch {epoch} was never taken from {loss.worker}, which was lost ({loss.cause})"
            elif took_ms > limit_ms:
                yield rid, f"taken from the lost {loss.worker} after {took_ms:.0f} ms, {limit_ms:.0f} allowed"


def bounded_residue(history: History) -> Broken:
    """I12: afterwards nothing is left but results with a life, and nobody is connected."""
    remains = history.remains
    for key, life_ms in remains.lives.items():
        if key.startswith(("r:", "ev:", "usage:", "batches")):
            if life_ms < 0:
                yield key.partition(":")[2], f"{key} would stay for ever"
        elif key not in FOR_EVER:
            yield "", f"{key} is left"
    for name, stream in remains.streams.items():
        stale = set(stream.consumers) - remains.stale_consumers_allowed
        if stale:
            yield "", f"stream {name} remembers {len(stale)} workers that have left"
    if remains.clients > remains.clients_before:
        yield "", f"{remains.clients} clients are connected, {remains.clients_before} were before"


def tenants_stay_apart(history: History) -> Broken:
    """I13: no tenant ever sees another tenant's request."""
    owners = {rid: order.tenant for rid, order in history.orders.items()}
    words = {order.word: order.tenant for order in history.orders.values()}
    for seen in history.sightings:
        if owners.get(seen.rid, seen.tenant) != seen.tenant:
            yield seen.rid, f"published to {seen.tenant}, it is {owners[seen.rid]}'s"
    for reading in history.readings:
        if owners.get(reading.rid, reading.tenant) != reading.tenant:
            yield reading.rid, f"read by {reading.tenant}, it is {owners[reading.rid]}'s"
        for token in " ".join(reading.shown).split():
            word = token.partition("~")[0].rstrip("0123456789")
            if words.get(word, reading.tenant) != reading.tenant:
                yield reading.rid, f"{reading.tenant} was shown {word!r}, which is {words[word]}'s"
    for probe in history.probes:
        if probe.answer != "request_not_found":
            yield probe.rid, f"{probe.asker} asked for another tenant's request, and got {probe.answer}"


def _starts(history: History) -> dict[str, dict[int, str]]:
    """Who ran each request in which epoch, as far as anybody saw it."""
    starts: dict[str, dict[int, str]] = defaultdict(dict)
    frames = [(rid, frame) for rid, log in history.remains.logs.items() for frame in log]
    frames += [(seen.rid, seen.frame) for seen in history.sightings]
    for rid, frame in frames:
        if frame.seq == 0 and frame.body:
            event = frame.event()
            if isinstance(event, Start):
                starts[rid][frame.epoch] = event.worker
    for glimpse in history.glimpses:
        for rid, (epoch, owner) in glimpse.running.items():
            starts[rid][epoch] = owner
    for loss in history.losses:
        for rid, epoch in loss.held.items():
            starts[rid].setdefault(epoch, loss.worker)
    return starts
