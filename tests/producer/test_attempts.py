"""Whatever becomes of attempts, and of the events that tell of them, a reader ends with the final text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfleet_common import codec
from streamfleet_common.errors import GenerationFailed, IncompleteGeneration
from streamfleet_common.frames import Frame
from streamfleet_common.schemas import Choice, Delta, End, Event, Parts, Prefill, Restart, Start
from streamfleet_producer.event_reader import EventReader
from streamfleet_producer.link import Link, Patience
from streamfleet_producer.place import Place
from streamfleet_producer.sharing import Sharing
from streamfleet_producer.ticket import Ticket
from streamfleet_producer.token_stream import PartStream, TokenStream

PREFILL = Prefill(token_ids=(1,), texts=("p",), logprobs=(None,))
Answer = list[tuple[int, str, float]]
"""Tokens of one choice: id, text, log-probability."""


@dataclass
class Attempt:
    """Says its answer in pieces, as (choice, tokens), until it is lost."""

    exact: str
    answer: int
    """Which of the answers it says."""
    pieces: list[tuple[int, int]]
    epoch: int = 0


@dataclass
class World:
    """A request's life, and what comes of it to a reader."""

    answers: list[list[Answer]]
    attempts: list[Attempt]
    has_prefill: bool
    fates: list[Literal["heard", "lost", "twice", "early"]]
    """Of each message: "early" comes after those that follow it, as far as one turn goes."""
    log_lasts: int
    """So many events are in the log before it is gone."""
    read_each: int
    """After so many messages the reader has its turn."""
    has_parts: bool = False
    """Its one answer is a handler's output, whose parts are the tokens."""
    frames: list[Frame] = field(default_factory=list)

    def __post_init__(self) -> None:
        for attempt in self.attempts:
            said: list[Event] = [Start(worker="w", model="m", exact=attempt.exact)]
            said += [PREFILL] * self.has_prefill
            said += self.deltas(attempt)
            self.frames += [_frame(attempt.epoch, seq, event) for seq, event in enumerate(said)]
        last = self.attempts[-1]
        end = End(
            state="done",
            choices=() if self.has_parts else tuple(map(_choice, range(len(self.final)), self.final)),
            outputs=tuple(map(list, self.final[0])) if self.has_parts else (),
            exact=last.exact,
            of=last.epoch,
            last_seq=self.frames[-1].seq,
        )
        self.frames.append(_frame(last.epoch + 1, 1, end))

    @property
    def final(self) -> list[Answer]:
        return self.answers[self.attempts[-1].answer]

    def deltas(self, attempt: Attempt) -> list[Delta | Parts]:
        said: list[Delta | Parts] = []
        at = dict.fromkeys(range(len(self.final)), 0)
        for index, count in attempt.pieces:
            tokens = self.answers[attempt.answer][index][at[index] : at[index] + count]
            at[index] += count
            if tokens:
                parts = Parts(values=tuple(map(list, tokens)))
                said.append(parts if self.has_parts else _delta(index, tokens))
        return said


def _delta(index: int, tokens: Answer) -> Delta:
    ids, texts, logprobs = zip(*tokens, strict=True)
    return Delta(index=index, token_ids=ids, texts=texts, logprobs=logprobs)


def _choice(index: int, answer: Answer) -> Choice:
    return Choice(
        index=index,
        text="".join(text for _, text, _ in answer),
        token_ids=tuple(token for token, _, _ in answer),
        logprobs=tuple(logprob for _, _, logprob in answer),
        finish_reason="eos",
    )


def _frame(epoch: int, seq: int, event: Event) -> Frame:
    return Frame(epoch, seq, codec.encode(event), (1, 2, 3, 1) if isinstance(event, Start | End) else ())


def _bytes(frame: Frame) -> bytes:
    times = "".join(f",{time}" for time in frame.times)
    return f"{frame.epoch}-{frame.seq}{times} ".encode() + frame.body


class StubLink:
    """A log and a record that hold what has happened so far."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.happened = 0
        self.broker = self
        self.patience = Patience(3600, 3600, 3600)
        self.is_closed = False
        self.watch: set[object] = set()
        self.waiting: set[object] = set()
        self.sharing = Sharing()

    def now(self) -> float:
        return 0.0

    async def events(self, _: str, after: str) -> list[Frame]:
        place = tuple(map(int, after.split("-"))) if after != "-" else (0, -1)
        gone = self.happened > self.world.log_lasts
        logged = [] if gone else self.world.frames[: self.happened]
        return [frame for frame in logged if (frame.epoch, frame.seq) > place][:3]

    async def record(self, _: str) -> Any:
        ended = self.happened == len(self.world.frames)
        return SimpleNamespace(end=self.world.frames[-1] if ended else None)

    def leave(self, *_: object) -> None: ...

    async def cancel_quietly(self, _: str) -> None: ...


def _record(world: World, happened: int) -> Any:
    ended = happened == len(world.frames)
    return SimpleNamespace(
        epoch=world.frames[max(0, happened - 1)].epoch, end=world.frames[-1] if ended else None
    )


async def watch(  # noqa: C901 (a scenario is told in one piece)
    world: World,
    *,
    deltas_only: bool,
    after: str = "",
    missed: int = 0,
    places: list[str] | None = None,
    is_told: bool = False,
) -> tuple[list[Event], Exception | None]:
    """What a reader is shown, and what is raised at its end.

    He comes when `missed` frames have been sent, and goes on behind the place `after`, if that is given.
    Where he stood after each event goes into `places`. With `is_told` he is told that messages were lost
    before he hears the next one, as whoever listens on a connection is when that is made anew.
    """
    link = StubLink(world)
    link.happened = missed
    reader = EventReader(cast(Link, link))

    async def opening() -> Ticket:
        if after:
            await reader.resume(Place.parse(after), _record(world, missed))
        reader.arm(deadline_at=1e9, doubtful=bool(missed))
        return Ticket("x", "queued", duplicate=False, depth=1)

    shown: list[Event] = []

    async def read(stream: TokenStream | PartStream) -> None:
        async for event in stream if deltas_only else stream.events():
            # One by one: what came before an error counts.
            shown.append(Parts(values=(event,)) if isinstance(event, list) else event)
            if places is not None:
                places.append(stream.place)

    async with (PartStream if world.has_parts else TokenStream)(reader, opening) as stream:
        reading = asyncio.create_task(read(stream))
        early: list[bytes] = []
        has_missed = False
        told = list(zip(world.frames, world.fates, strict=True))[missed:]
        for number, (frame, fate) in enumerate(told, missed):
            link.happened += 1
            heard = [_bytes(frame)] * {"heard": 1, "lost": 0, "twice": 2, "early": 1}[fate]
            early, now = (early + heard, []) if fate == "early" else (early, heard)
            if number % world.read_each == 0:
                now, early = now + early, []
            if is_told and now and has_missed:
                reader.missed()
            has_missed = fate == "lost" or (has_missed and not now)
            for data in now:
                reader.heard(data)
            for _ in range(5 if number % world.read_each == 0 else 0):
                await asyncio.sleep(0)
        for data in early:
            reader.heard(data)
        reader.silent()  # as the watch says it after some seconds without a message
        async with asyncio.timeout(60):
            try:
                await reading
            except (GenerationFailed, IncompleteGeneration) as error:
                return shown, error
    return shown, None


# --- worlds

TOKENS = st.tuples(st.integers(0, 2), st.sampled_from(["", "a", "b", "ab"]), st.sampled_from([-0.5, -0.25]))
CLASSES = ("", "x", "y")


@st.composite
def worlds(
    draw: st.DrawFn, *, classes: Sequence[str] = CLASSES, answers: int = 2, loss: bool = True
) -> World:
    """Attempts by workers of these classes: all that say to be of one give the same answer."""
    has_parts = draw(st.booleans())
    choices = 1 if has_parts else draw(st.integers(1, 3))
    said = [[draw(st.lists(TOKENS, max_size=5)) for _ in range(choices)] for _ in range(answers)]
    # A class has its answer; whoever promises nothing may give any.
    of_class = {name: draw(st.integers(0, answers - 1)) for name in classes if name}
    attempts, epoch = [], 0
    for place in range(count := draw(st.integers(1, 4))):
        exact = draw(st.sampled_from(classes))
        answer = of_class[exact] if exact else draw(st.integers(0, answers - 1))
        pieces = draw(st.lists(st.tuples(st.integers(0, choices - 1), st.integers(1, 3)), max_size=8))
        if place == count - 1:
            pieces += [(index, 5) for index in range(choices)]
        epoch += draw(st.integers(1, 2))
        attempts.append(Attempt(exact, answer, pieces, epoch))
    world = World(said, attempts, draw(st.booleans()), [], 10**6, draw(st.integers(1, 4)), has_parts)
    fates: Any = st.sampled_from(["heard", "lost", "twice", "early"]) if loss else st.just("heard")
    world.fates = draw(st.lists(fates, min_size=len(world.frames), max_size=len(world.frames)))
    return world


def standing(shown: Sequence[Event]) -> dict[int, list[tuple[int, str, float | None]]]:
    """The tokens that stand, by choice: those since the last restart."""
    stand: dict[int, list[tuple[int, str, float | None]]] = {}
    for event in shown:
        if isinstance(event, Restart):
            stand = {}
        elif isinstance(event, Delta):
            tokens = zip(event.token_ids, event.texts, event.logprobs, strict=True)
            stand.setdefault(event.index, []).extend(tokens)
        elif isinstance(event, Parts):
            stand.setdefault(0, []).extend(map(tuple, event.values))
    return stand


def restarts(shown: Sequence[Event]) -> int:
    return sum(isinstance(event, Restart) for event in shown)


def check(world: World, shown: Sequence[Event], *, to_the_bit: bool = True) -> None:
    """What stands is the final answer, and at no moment was a choice anything but the beginning of one.

    Without `to_the_bit`, log-probabilities may be those of another attempt with the same tokens.
    """
    for index, answer in enumerate(world.final):
        got = standing(shown).get(index, [])
        assert len(got) == len(answer)
        assert _begins(answer, got, to_the_bit)
        assert "".join(text for _, text, _ in got) == "".join(text for _, text, _ in answer)
    for upto in range(len(shown)):
        for index, got in standing(shown[:upto]).items():
            assert any(_begins(answer[index], got, to_the_bit) for answer in world.answers)


def _begins(answer: Answer, got: Sequence[tuple[int, str, float | None]], to_the_bit: bool) -> bool:
    text = "".join(text for _, text, _ in answer)
    return (
        [token for token, _, _ in answer][: len(got)] == [token for token, _, _ in got]
        and text.startswith("".join(text for _, text, _ in got))
        and (
            not to_the_bit
            or [logprob for _, _, logprob in answer][: len(got)] == [logprob for _, _, logprob in got]
        )
    )


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_a_reader_of_events_ends_with_the_final_text(world: World) -> None:
    shown, error = asyncio.run(watch(world, deltas_only=False))
    assert error is None
    check(world, shown)


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_a_reader_of_deltas_does_so_or_is_told_that_it_cannot(world: World) -> None:
    shown, error = asyncio.run(watch(world, deltas_only=True))
    if error is None:
        check(world, shown, to_the_bit=False)  # of attempts that promise nothing, the text is what counts
    else:
        assert isinstance(error, GenerationFailed)
        assert len({attempt.answer for attempt in world.attempts}) > 1


@settings(max_examples=100, deadline=None)
@given(worlds(classes=("x",)), st.booleans(), st.integers(0, 30))
def test_of_exact_workers_no_restart_is_ever_seen(world: World, deltas_only: bool, log_lasts: int) -> None:
    # Not even when the log is gone, and the end alone tells what is missing.
    world.log_lasts = log_lasts
    shown, error = asyncio.run(watch(world, deltas_only=deltas_only))
    assert error is None
    check(world, shown)
    assert restarts(shown) == 0


@settings(max_examples=100, deadline=None)
@given(worlds(classes=("",), answers=1), st.booleans())
def test_a_reader_of_deltas_need_not_see_one_where_the_answer_is_the_same(
    world: World, log_is_gone: bool
) -> None:
    world.log_lasts = 0 if log_is_gone else 10**6
    shown, error = asyncio.run(watch(world, deltas_only=True))
    assert error is None
    check(world, shown)


def expected_restarts(world: World) -> int:
    """How many there are where every message is heard, counted by hand."""
    count, last, is_shown = 0, "", False
    for attempt in world.attempts:
        says = world.has_prefill or bool(world.deltas(attempt))
        if is_shown and not (attempt.exact == last != ""):
            count, is_shown = count + 1, False
        last, is_shown = attempt.exact, is_shown or says
    return count


@settings(max_examples=100, deadline=None)
@given(worlds(loss=False))
def test_a_restart_is_seen_exactly_where_nobody_promises_the_same_bits(world: World) -> None:
    shown, error = asyncio.run(watch(world, deltas_only=False))
    assert error is None
    check(world, shown)
    assert restarts(shown) == expected_restarts(world)


@st.composite
def broken_promises(draw: st.DrawFn) -> World:
    """Workers that all say to be of one class, and are not."""
    world = draw(worlds(classes=("",)))
    attempts = [Attempt("x", one.answer, one.pieces, one.epoch) for one in world.attempts]
    return replace(world, attempts=attempts, frames=[])


@settings(max_examples=100, deadline=None)
@given(broken_promises())
def test_a_broken_promise_is_a_restart_and_never_a_spliced_text(world: World) -> None:
    shown, error = asyncio.run(watch(world, deltas_only=False))
    assert error is None
    check(world, shown)


@pytest.mark.parametrize("deltas_only", [True, False])
def test_what_a_broken_promise_looks_like(deltas_only: bool) -> None:
    one, other = [(0, "a", -0.5), (1, "b", -0.5)], [(0, "a", -0.5), (2, "c", -0.5)]
    attempts = [Attempt("x", 0, [(0, 2)], 1), Attempt("x", 1, [(0, 1), (0, 1)], 3)]
    world = World(
        [[one], [other]], attempts, has_prefill=False, fates=["heard"] * 6, log_lasts=9, read_each=1
    )
    shown, error = asyncio.run(watch(world, deltas_only=deltas_only))
    if deltas_only:
        assert shown == [_delta(0, one)]
        assert isinstance(error, GenerationFailed)
        assert error.retryable
    else:
        assert error is None
        assert [type(event) for event in shown] == [Start, Delta, Restart, Start, Delta]
        assert shown[-1] == _delta(0, other)


# --- readers who come back


async def come_back(world: World, cut: int, missed: int, log_lasts: int) -> list[Event]:
    """What somebody has seen who lost his connection after `cut` events, and then read on to the end."""
    places: list[str] = []
    first, error = await watch(world, deltas_only=False, places=places, is_told=True)
    assert error is None
    seen, place = first[:cut], ["", *places][min(cut, len(first))]
    world.log_lasts = log_lasts
    rest, error = await watch(world, deltas_only=False, after=place, missed=missed, is_told=True)
    assert error is None
    return [*seen, *rest] if place else rest  # without an id he knows that he begins anew


@settings(max_examples=100, deadline=None)
@given(worlds(), st.data())
def test_who_comes_back_ends_with_the_final_text(world: World, data: st.DataObject) -> None:
    # A connection keeps the order of messages.
    world.fates = ["heard" if fate == "early" else fate for fate in world.fates]
    count = len(world.frames)
    shown = asyncio.run(
        come_back(world, data.draw(st.integers(0, 30)), count, data.draw(st.sampled_from([0, 10**6])))
    )
    check(world, shown)


@settings(max_examples=60, deadline=None)
@given(worlds(loss=False), st.data())
def test_where_the_log_lasts_who_comes_back_sees_what_he_would_have_seen(
    world: World, data: st.DataObject
) -> None:
    places: list[str] = []
    shown, _ = asyncio.run(watch(world, deltas_only=False, places=places))
    cut = data.draw(st.integers(0, len(shown)))
    place = ["", *places][cut]
    # Of the events that have one place, only the first leads there; who comes back gets the others again.
    whole = places.index(place) + 1 if place else 0
    world.fates = ["heard"] * len(world.frames)
    happened = [number for number, frame in enumerate(world.frames, 1) if place in ("", frame.id)]
    missed = data.draw(st.integers(happened[0] if place and happened else 0, len(world.frames)))
    rest, error = asyncio.run(watch(world, deltas_only=False, after=place, missed=missed))
    assert error is None
    assert rest == shown[whole:]
