"""Checks of one queue, each a small function of what Redis told of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from streamfleet_producer.operations.checkup import Check, Level, seconds
from streamfleet_producer.operations.queue_facts import QueueFacts

LONG_MS = 300_000
"""A request that waits for longer than this is told: half the usual deadline."""
NEARLY_FULL = 0.8
SWEEP_LEASES = 4
"""So many leases without a sweep, though workers live, are told."""
FORGOTTEN_MS = 1_200_000
"""Consumers that hold nothing are removed after 10 minutes; one that is still there after 20 is told."""
FUTURE_MS = 2_000
CARD_LIFE_MS = 15_000
OLD_MS = 86_400_000


def check_queue(queue: QueueFacts) -> list[Check]:
    """All of them."""
    checks: tuple[Callable[[QueueFacts], Check], ...] = (
        workers,
        versions,
        settings,
        paused,
        marks,
        depth,
        waiting,
        overdue,
        sweeps,
        groups,
        ownerless,
        consumers,
        strays,
        dead,
        clock,
    )
    return [check(queue) for check in checks]


def _check(queue: QueueFacts, name: str, level: Level, words: str, mend: str = "") -> Check:
    return Check(f"queue {queue.name}", name, level, words, mend)


def _unseen(queue: QueueFacts, name: str) -> Check:
    return _check(queue, name, "unseen", "this user may not ask: take one of the role operator, or grant it")


def workers(queue: QueueFacts) -> Check:
    """Whether anybody serves it."""
    ready = [
        card for card in queue.cards if card.state == "ready" and card.worker not in queue.control.drains
    ]
    draining = len(queue.cards) - len(ready)
    start = f"streamfleet worker --queue {queue.name}"
    if ready:
        words = f"{len(ready)} take work" if len(ready) > 1 else "1 takes work"
        return _check(queue, "workers", "ok", words + (f", {draining} drain" if draining else ""))
    open_ = queue.depth.open
    words = "all drain" if draining else "nobody serves it"
    if queue.announced_ms and not draining:
        ago = queue.now_ms - queue.announced_ms
        words += f", for {seconds(ago)}" if ago >= CARD_LIFE_MS else ""
        if not open_ and ago > OLD_MS:
            return _check(
                queue,
                "workers",
                "warning",
                words,
                f"{start}, or redis-cli HDEL streamfleet:queues {queue.name}",
            )
    if open_:
        return _check(queue, "workers", "fault", f"{words}, and {open_:,} requests are open", start)
    return _check(queue, "workers", "warning", words, start)


def versions(queue: QueueFacts) -> Check:
    """Whether its workers are of one version."""
    unread = len(queue.control.workers) - len(queue.cards)
    if unread > 0:
        return _check(
            queue,
            "versions",
            "fault",
            f"{unread} workers are of a version that this one cannot read",
            "upgrade this machine, or those workers",
        )
    return _alike(
        queue,
        "versions",
        "version",
        (card.version or "unknown" for card in queue.cards),
        "finish the upgrade",
    )


def settings(queue: QueueFacts) -> Check:
    """Whether its workers agree on what holds for the whole queue."""
    differing = []
    said: dict[str, list[float]] = {
        "STREAMFLEET_LEASE_S": [card.lease_ms / 1000 for card in queue.cards if card.lease_ms],
        "STREAMFLEET_SUB_LANES": [card.sub_lanes for card in queue.cards if card.sub_lanes],
        "STREAMFLEET_MAX_QUEUE_DEPTH": [card.limits.max_queue_depth for card in queue.cards],
        "STREAMFLEET_MAX_QUEUE_TOKENS": [card.limits.max_queue_tokens for card in queue.cards],
    }
    for name, values in said.items():
        if len(set(values)) > 1:
            differing.append(f"{name} ({', '.join(f'{value:g}' for value in sorted(set(values)))})")
    if differing:
        return _check(
            queue,
            "settings",
            "warning",
            f"workers differ in {', '.join(differing)}: the one that announced last sets it for all",
            "give all workers of the queue the same, and restart those that differ",
        )
    return _check(
        queue, "settings", "ok", "workers agree" if queue.cards else "no worker, nothing to agree on"
    )


def paused(queue: QueueFacts) -> Check:
    """Whether it takes requests."""
    if queue.control.is_paused:
        return _check(
            queue, "paused", "warning", "it refuses new requests", f"streamfleet resume {queue.name}"
        )
    until = queue.control.settings.get("crowded_until", "0")
    if until.isdigit() and int(until) > queue.now_ms:
        return _check(
            queue,
            "paused",
            "fault",
            "it refuses new requests: the memory of Redis is nearly full",
            "raise maxmemory, shorten result_ttl, or add workers",
        )
    return _check(queue, "paused", "ok", "it takes requests")


def marks(queue: QueueFacts) -> Check:
    """Marks of workers that were to drain, and are gone."""
    leaked = queue.control.leaked
    if leaked:
        return _check(
            queue,
            "drain marks",
            "warning",
            f"{len(leaked)} of workers long gone",
            f"redis-cli HDEL '{queue.key}:control' {' '.join(f'drain:{name}' for name in leaked)}",
        )
    return _check(queue, "drain marks", "ok", "none is left over")


def depth(queue: QueueFacts) -> Check:
    """How full it is."""
    found = queue.depth
    words = f"{found.queued:,} queued and {found.running:,} running, of {found.limit:,} at most"
    mend = f"streamfleet worker --queue {queue.name}, or a higher STREAMFLEET_MAX_QUEUE_DEPTH"
    if found.open >= found.limit:
        return _check(queue, "depth", "fault", f"{words}: new requests are refused", mend)
    if found.open >= NEARLY_FULL * found.limit:
        return _check(queue, "depth", "warning", f"{words}: soon new requests are refused", mend)
    return _check(queue, "depth", "ok", words)


def waiting(queue: QueueFacts) -> Check:
    """How long the next ones have waited."""
    if queue.backlog is None:
        return _unseen(queue, "waiting")
    oldest = queue.backlog.oldest_ms
    if oldest > LONG_MS:
        return _check(
            queue,
            "waiting",
            "warning",
            f"the first in a lane waits for {seconds(oldest)}",
            f"streamfleet worker --queue {queue.name}",
        )
    return _check(queue, "waiting", "ok", f"for {seconds(oldest)} at most" if oldest else "nobody waits")


def overdue(queue: QueueFacts) -> Check:
    """Requests past their deadline that nobody ended."""
    if queue.overdue is None:
        return _unseen(queue, "overdue")
    if queue.overdue:
        return _check(
            queue,
            "overdue",
            "fault",
            f"{queue.overdue:,} requests are past their deadline, and nobody ends them: nobody sweeps",
            f"streamfleet worker --queue {queue.name}, or streamfleet bulk cron",
        )
    return _check(queue, "overdue", "ok", "none")


def sweeps(queue: QueueFacts) -> Check:
    """Whether somebody looks after lost work."""
    if queue.sweep is None:
        return _unseen(queue, "sweeps")
    last = queue.sweep.get("last", "")
    ago = queue.now_ms - int(last) if last.isdigit() else None
    words = "nobody has ever swept" if ago is None else f"the last one {seconds(max(0, ago))} ago"
    if queue.cards and ago is None:
        words += ": a worker does so within seconds"
        return _check(queue, "sweeps", "warning", words, "look again in half a minute")
    if queue.cards and ago is not None and ago > SWEEP_LEASES * queue.lease_ms:
        return _check(
            queue,
            "sweeps",
            "fault",
            f"{words}, though workers live: what lost workers held is not given to others",
            "look into the workers' logs for refusals: redis-cli ACL LOG",
        )
    if not queue.cards and queue.depth.running:
        return _check(
            queue,
            "sweeps",
            "warning",
            f"{words}, and nobody is there to",
            f"streamfleet worker --queue {queue.name}, or streamfleet bulk cron",
        )
    return _check(queue, "sweeps", "ok", words)


def groups(queue: QueueFacts) -> Check:
    """Whether each stream has the group that workers read by."""
    if queue.streams is None:
        return _unseen(queue, "groups")
    without = [one.name for one in queue.streams if not one.has_group]
    if without and not queue.cards:
        return _check(queue, "groups", "ok", f"none on {', '.join(without)}: the first worker makes it")
    if without:
        return _check(
            queue,
            "groups",
            "warning",
            f"none on {', '.join(without)}: somebody destroyed it; workers make it anew when they read",
            f"redis-cli XGROUP CREATE '{queue.key}:s:{without[0]}' w 0",
        )
    return _check(queue, "groups", "ok", f"on all {len(queue.streams)} streams")


def ownerless(queue: QueueFacts) -> Check:
    """Requests that silent workers hold, and that nobody takes back."""
    if queue.streams is None:
        return _unseen(queue, "lost work")
    lost = sum(one.lost for one in queue.streams)
    if lost:
        return _check(
            queue,
            "lost work",
            "fault",
            f"{lost:,} requests are held by workers that were silent for two leases: nobody sweeps",
            f"streamfleet worker --queue {queue.name}, or streamfleet bulk cron",
        )
    held = {one.name: one.pending for _, one in queue.consumers if one.name not in queue.control.workers}
    count = sum(held.values())
    if count:
        words = f"{count:,} requests of workers without a card: a sweep gives them to others in time"
        return _check(queue, "lost work", "ok", words)
    return _check(queue, "lost work", "ok", "none")


def consumers(queue: QueueFacts) -> Check:
    """Consumers of workers long gone that hold nothing."""
    if queue.streams is None:
        return _unseen(queue, "consumers")
    stale = {
        consumer.name
        for _, consumer in queue.consumers
        if not consumer.pending
        and consumer.idle_ms > FORGOTTEN_MS
        and consumer.name not in queue.control.workers
    }
    if stale:
        return _check(
            queue,
            "consumers",
            "warning",
            f"{len(stale)} of workers long gone are left: nobody sweeps",
            f"streamfleet worker --queue {queue.name}, or streamfleet bulk cron",
        )
    return _check(queue, "consumers", "ok", "none of workers long gone")


def strays(queue: QueueFacts) -> Check:
    """Entries that are no request."""
    if queue.strays is None:
        return _unseen(queue, "strays")
    if queue.strays:
        return _check(
            queue,
            "strays",
            "warning",
            f"{queue.strays:,} waiting entries have no record: somebody writes around the submit script, "
            "or deleted records",
            f"once workers have read them: streamfleet dead list --queue {queue.name}",
        )
    return _check(queue, "strays", "ok", "each entry that waits has a record")


def dead(queue: QueueFacts) -> Check:
    """Requests that kill workers."""
    if queue.depth.dead:
        return _check(
            queue,
            "dead letters",
            "warning",
            f"{queue.depth.dead:,}: requests that kill workers, or entries that were none",
            f"streamfleet dead list --queue {queue.name}",
        )
    return _check(queue, "dead letters", "ok", "none")


def clock(queue: QueueFacts) -> Check:
    """Whether the server's clock was set back: nothing may be from its future."""
    last = (queue.sweep or {}).get("last", "0")
    times = [int(last) if last.isdigit() else 0, *(one.last_read_ms for one in queue.streams or ())]
    ahead = max(times) - queue.now_ms
    if ahead > FUTURE_MS:
        return _check(
            queue,
            "clock",
            "fault",
            f"something happened {seconds(ahead)} after now: the clock of Redis was set back, "
            "so leases and deadlines wait for so long",
            "timedatectl set-ntp true on the server; all is well once that time is over",
        )
    return _check(queue, "clock", "ok", "the clock of Redis was not set back")


def _alike(queue: QueueFacts, name: str, what: str, values: Iterable[str], mend: str) -> Check:
    found = Counter(values)
    if len(found) > 1:
        shown = ", ".join(f"{count} of {value}" for value, count in sorted(found.items()))
        return _check(queue, name, "warning", f"workers are of more than one {what}: {shown}", mend)
    return _check(queue, name, "ok", f"{what} {next(iter(found))}" if found else "no worker")
