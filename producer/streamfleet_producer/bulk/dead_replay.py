"""Dead letters sent again, one after the other and not too fast: each of them has killed workers before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamfleet_common import codec
from streamfleet_common.dead_letters import DeadLetter
from streamfleet_common.errors import InvalidRequest, QueueFull, Undecodable
from streamfleet_common.submissions import Submission
from streamfleet_producer.bulk.dead_broker import DeadBroker
from streamfleet_producer.intake import keyed_rid

PER_MINUTE = 6.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """A letter that was sent again, and the id of the request that it is now."""

    letter: str
    rid: str


class DeadReplay:
    """Sends dead letters of one queue again, at most `per_minute`, and drops them from the dead.

    A letter becomes a new request, whose id follows from the letter's: sent twice, since somebody was killed
    between sending and dropping it, it is still one request. Its lost workers are forgotten: if it kills
    again, it is buried again.

    Args:
        broker: of the queue.
        per_minute: so many at most.
        told: is called with each as soon as it is sent.
    """

    def __init__(
        self,
        broker: DeadBroker,
        *,
        per_minute: float = PER_MINUTE,
        told: Callable[[Replayed], None] = lambda _: None,
    ) -> None:
        if not 0 < per_minute <= 60_000:
            raise InvalidRequest("rate: above 0, up to 60,000 a minute is wanted")
        self._broker = broker
        self._pause_s = 60 / per_minute
        self._told = told
        self.passed_over = 0
        """Letters that `replay_all` could not send."""

    async def replay(self, letter: DeadLetter) -> Replayed:
        """Send one again.

        Raises:
            InvalidRequest: its payload was not kept, or is no request.
            QueueFull: the queue takes no more now.
        """
        if letter.payload is None:
            raise InvalidRequest(
                f"dead letter {letter.id} has no payload: workers keep it where "
                "STREAMFLEET_DEAD_LETTER_PAYLOAD is set"
            )
        try:
            envelope = codec.decode_envelope(letter.payload)
        except InvalidRequest:
            raise Undecodable(f"dead letter {letter.id} holds no request that can be read") from None
        rid = keyed_rid(f"dead:{letter.id}".encode(), letter.rid)
        submission = Submission.of(envelope.changed({"rid": rid}))
        (submitted,) = await self._broker.submit([submission])
        if submitted.outcome == "full":
            why = "takes no more now"
            if submitted.reason == "paused":
                why = "is paused (`streamfleet resume` opens it)"
            raise QueueFull(
                f"the queue {why}: try again in {submitted.retry_after_s:g} s",
                retry_after=submitted.retry_after_s,
                limit=submitted.limit,
                reason=submitted.reason,
                position=submitted.depth,
            )
        await self._broker.drop_dead([letter.id])
        replayed = Replayed(letter.id, rid)
        self._told(replayed)
        return replayed

    async def replay_each(self, letters: Sequence[DeadLetter]) -> list[Replayed]:
        """Send these again, with pauses between them. Raises as `replay`, at the first that cannot be."""
        done: list[Replayed] = []
        for letter in letters:
            if done:
                await asyncio.sleep(self._pause_s)
            done.append(await self.replay(letter))
        return done

    async def replay_all(self, *, most: int) -> list[Replayed]:
        """Send the oldest again, at most so many; those that cannot be are passed over.

        So are those of a tenant whose share is used up: the letters of others must not wait for it.

        Raises:
            QueueFull: the queue takes no more now; those before are sent.
        """
        done: list[Replayed] = []
        after = ""
        while len(done) < most:
            letters = await self._broker.dead_letters(after=after)
            if not letters:
                break
            for letter in letters:
                after = letter.id
                if len(done) >= most:
                    break
                if done:
                    await asyncio.sleep(self._pause_s)
                try:
                    done.append(await self.replay(letter))
                except InvalidRequest:
                    self.passed_over += 1
                except QueueFull as error:
                    if not error.reason.startswith("tenant_"):
                        raise
                    self.passed_over += 1
        return done
