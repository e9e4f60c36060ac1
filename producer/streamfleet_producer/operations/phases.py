"""Where the time of a request went, phase by phase; the phases are all of it, and add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfleet_common.schemas import End, Timing

_NO_TIMING = Timing()


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time."""

    name: str
    ms: float


def phases_of(end: End) -> list[Phase]:
    """Those of a request that has ended, one after the other.

    * queued: from acceptance until a worker took it; of several attempts it is called earlier, and ends when
      the last one began
    * tokenize, wait: in the worker, until its first batch
    * prefill, decode: to the first token, and to the last
    * device: of one-shot work, that its batches were computed
    * rest: what is left until its end was told: the way in and out, and between its batches; where the worker
      tells of no phase, as one that was lost, it is called run

    All but the first and the last are by the worker's clock, and these by the server's, in whole
    milliseconds: what the worker says is never shortened, so the sum may be a millisecond above what the
    server saw.
    """
    accepted, started, ended = end.queued_at_ms, end.started_at_ms, end.ended_at_ms
    if not started:
        return [Phase("queued", float(max(0, ended - accepted)))]
    held = float(max(0, ended - started))
    timing = end.timing
    phases = [
        Phase("queued" if end.attempt <= 1 else "earlier", float(max(0, started - accepted))),
        Phase("tokenize", timing.tokenize_ms),
        Phase("wait", timing.wait_ms),
        Phase("prefill", timing.prefill_ms),
        Phase("decode", timing.decode_ms),
    ]
    left = max(0.0, held - sum(phase.ms for phase in phases[1:]))
    # Batches of one request may be computed side by side, in several processes.
    phases.append(Phase("device", min(timing.device_ms, left)))
    left -= phases[-1].ms
    phases.append(Phase("rest" if timing != _NO_TIMING else "run", left))
    return [phases[0], *(phase for phase in phases[1:] if phase.ms > 0)]


def percentages(amounts: Sequence[float]) -> list[int]:
    """Whole percentages that add up to 100; all are 0 if there is nothing.

    Each is rounded down, and what is missing goes to those that lost most.
    """
    total = sum(amounts)
    if total <= 0:
        return [0] * len(amounts)
    exact = [100 * amount / total for amount in amounts]
    whole = [int(one) for one in exact]
    losers = sorted(range(len(exact)), key=lambda place: whole[place] - exact[place])
    for place in losers[: 100 - sum(whole)]:
        whole[place] += 1
    return whole


def bars(amounts: Sequence[float], width: int) -> list[tuple[int, int]]:
    """Where each begins and how long it is, in columns of a line so wide: one behind the other.

    What there is at all has a column, be it shared with a neighbour.
    """
    total = sum(amounts)
    if total <= 0:
        return [(0, 0)] * len(amounts)
    found = []
    before = 0.0
    for amount in amounts:
        first = min(width - 1, round(width * before / total))
        before += amount
        last = round(width * before / total)
        found.append((first, max(1, last - first) if amount > 0 else 0))
    return found


def duration(ms: float) -> str:
    """A time for a person, in eight characters or so."""
    if ms < 999.5:
        return "0 ms" if ms <= 0 else f"{ms:.{2 if ms < 1 else 1 if ms < 100 else 0}f} ms"
    seconds = int(ms / 1000)
    if seconds < 100:
        return f"{ms / 1000:.{2 if seconds < 10 else 1}f} s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if hours < 1:
        return f"{minutes} m {seconds % 60:02d} s"
    return f"{hours} h {minutes % 60:02d} m" if hours < 100 else f"{days} d {hours % 24:02d} h"
