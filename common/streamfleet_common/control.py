"""What operators write into a queue's control hash: that it is paused, and which workers shall drain."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from streamfleet_common.steps import Steps

DRAIN = "drain:"
"""How the field of a worker that shall drain begins; its value is when it was asked to (server ms)."""
MARK_LIFE_MS = 600_000
"""A mark without a card is kept for so long: its worker may be held up, and come back."""


@dataclass(frozen=True, slots=True)
class Control:
    """The hash as it is now, beside the workers that show a card now."""

    is_paused: bool
    workers: tuple[str, ...]
    """By name; those whose cards nobody can read are among them."""
    drains: dict[str, int]
    """Workers that shall drain, and since when (server ms; 1 where it was written by hand)."""
    settings: dict[str, str]
    """All else: what the workers announce."""
    now_ms: int

    @property
    def leaked(self) -> tuple[str, ...]:
        """Workers that were asked to drain long ago, and are gone."""
        return tuple(
            worker
            for worker, since_ms in sorted(self.drains.items())
            if worker not in self.workers and self.now_ms - since_ms > MARK_LIFE_MS
        )


class ControlSteps(Steps):
    """Pause, resume, drain. Each may be repeated without harm."""

    async def pause(self) -> bool:
        """Refuse new requests from now on; gives whether they were accepted before."""
        # What was there before cannot be told by HSET, which counts new fields: it may hold a 0.
        before = (await self.control()).is_paused
        await self._calls.ask(lambda: self._commands.hset(self.keys.control, "paused", "1"))
        return not before

    async def resume(self) -> bool:
        """Accept new requests again; gives whether they were refused before."""
        before = (await self.control()).is_paused
        await self._calls.ask(lambda: self._commands.hdel(self.keys.control, "paused"))
        return before

    async def mark_drain(self, worker: str) -> None:
        """Ask a worker to drain. Whoever calls has seen its card: a mark for nobody would stay."""
        seconds, micros = await self._calls.ask(self._commands.time)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        await self._calls.ask(lambda: self._commands.hset(self.keys.control, DRAIN + worker, str(now_ms)))

    async def unmark_drain(self, workers: tuple[str, ...]) -> int:
        """Take back that these workers shall drain; gives how many were asked to."""
        if not workers:
            return 0
        fields = [DRAIN + worker for worker in workers]
        return int(await self._calls.ask(lambda: self._commands.hdel(self.keys.control, *fields)))

    async def control(self) -> Control:
        """The hash and who lives, at one moment."""

        def ask() -> Awaitable[list[Any]]:
            # Made anew for each attempt: a pipeline is empty once it has run, even in vain.
            pipe = self._commands.pipeline(transaction=False)
            pipe.time()
            pipe.hgetall(self.keys.control)
            pipe.hgetall(self.keys.workers)
            return pipe.execute()

        (seconds, micros), fields, cards = await self._calls.ask(ask)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        shown = {_text(field): _text(value) for field, value in fields.items()}
        drains = {
            field.removeprefix(DRAIN): int(value) if value.isascii() and value.isdigit() else 1
            for field, value in shown.items()
            if field.startswith(DRAIN)
        }
        alive = [_text(name) for name, raw in cards.items() if _until_ms(raw) >= now_ms]
        return Control(
            is_paused=shown.get("paused") == "1",
            workers=tuple(sorted(alive)),
            drains=drains,
            settings={
                field: value
                for field, value in shown.items()
                if field != "paused" and not field.startswith(DRAIN)
            },
            now_ms=now_ms,
        )


def _until_ms(raw: bytes) -> int:
    until, _, _ = raw.partition(b"|")
    return int(until) if until.isdigit() else 0


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
