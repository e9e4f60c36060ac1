"""Requests that are submitted together and waited for together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from streamfleet_common.errors import InvalidRequest, ModelNotFound, StreamfleetError
from streamfleet_common.schemas import End, Request
from streamfleet_common.submissions import Submission
from streamfleet_producer.answer import Answers
from streamfleet_producer.intake import Intake
from streamfleet_producer.link import Link
from streamfleet_producer.ticket import DEADLINE_S, Options


class Many:
    """One round trip to listen, one to submit. What becomes of each is found under its place.

    `excuse` puts a failure in the place of its answer; otherwise the first one is raised, and what is still
    open is cancelled.
    """

    def __init__(self, requests: Sequence[Request], keys: Sequence[str] | None, *, excuse: bool) -> None:
        self._requests = requests
        self._keys: Sequence[str | None] = [None] * len(requests) if keys is None else keys
        if len(self._keys) != len(requests):
            raise InvalidRequest(
                f"{len(self._keys)} idempotency keys for {len(requests)} requests: give one each"
            )
        self._excuse = excuse
        self._submissions: dict[int, Submission] = {}
        self._outcomes: dict[int, End | StreamfleetError] = {}

    async def run(
        self, intake: Intake, link: Link, options: Options, late_at: float
    ) -> list[End | StreamfleetError]:
        """The outcomes, in the order of the requests; `late_at` is the loop's time to give up."""
        await self._prepare(intake, link, options)
        submissions = list(self._submissions.values())
        async with Answers(link, [one.envelope.rid for one in submissions]) as answers:
            batch = await link.submit_all(submissions)
            waiting: dict[int, asyncio.Future[End]] = {}
            # All of them first: what was accepted has to be cancelled if the refusal of another is raised.
            for place, answer, submitted in zip(self._submissions, answers, batch, strict=True):
                if link.refusal(submitted) is None:
                    waiting[place] = answer.future
                    answer.accepted(
                        submitted,
                        keyed=self._keys[place] is not None,
                        deadline_s=options.get("deadline_s", DEADLINE_S),
                        late_at=late_at,
                    )
            for place, submitted in zip(self._submissions, batch, strict=True):
                refusal = link.refusal(submitted)
                if refusal is not None:
                    self._refused(place, refusal)
            ended = await asyncio.gather(*waiting.values(), return_exceptions=self._excuse)
            for place, outcome in zip(waiting, ended, strict=True):
                if not isinstance(outcome, End | StreamfleetError):
                    raise outcome
                self._outcomes[place] = outcome
        return [self._outcomes[place] for place in range(len(self._requests))]

    async def _prepare(self, intake: Intake, link: Link, options: Options) -> None:
        for place, (request, key) in enumerate(zip(self._requests, self._keys, strict=True)):
            try:
                self._submissions[place] = await intake.prepare(
                    link.catalogue, request, stream=False, key=key, options=options
                )
            except (InvalidRequest, ModelNotFound) as error:
                self._refused(place, error)

    def _refused(self, place: int, error: StreamfleetError) -> None:
        if not self._excuse:
            raise error
        self._outcomes[place] = error
