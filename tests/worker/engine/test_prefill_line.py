"""Chunks of prompts, and that nobody's first token waits for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from stand_in_sequence import stand_in
from streamfleet_worker.engine.prefill_line import Chunk, PrefillLine

if TYPE_CHECKING:
    from streamfleet_worker.engine.sequence import Sequence


def line(chunk: int, **prompts: int) -> PrefillLine:
    made = PrefillLine(chunk)
    for name, length in prompts.items():
        made.add(stand_in(name, prompt=length))
    return made


def compute(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    for chunk in chunks:
        chunk.sequence.computed = chunk.end
    return [(chunk.sequence.key[0], chunk.start, chunk.end) for chunk in chunks]


def test_a_prompt_is_cut_at_multiples_of_the_chunk() -> None:
    made = line(100, a=250)
    assert [compute(made.take(1000)) for _ in range(4)] == [
        [("a", 0, 100)],
        [("a", 100, 200)],
        [("a", 200, 250)],
        [],
    ]
    assert not len(made)


def test_so_it_is_when_the_prefix_cache_had_its_beginning() -> None:
    made, sequence = PrefillLine(100), stand_in("a", prompt=250)
    sequence.computed = 96
    made.add(sequence)
    assert compute(made.take(1000)) == [("a", 96, 100)]
    assert compute(made.take(1000)) == [("a", 100, 200)]


def test_a_step_takes_what_fits_but_one_chunk_always() -> None:
    made = line(100, a=60, b=50, c=40)
    assert compute(made.take(100)) == [("a", 0, 60), ("c", 0, 40)]
    assert compute(made.take(10)) == [("b", 0, 50)]


def test_with_budget_several_long_ones_go_on_at_once() -> None:
    made = line(100, a=300, b=300, c=20)
    assert compute(made.take(250)) == [("c", 0, 20), ("a", 0, 100), ("b", 0, 100)]


def test_what_was_not_computed_is_given_out_again() -> None:
    made = line(100, a=150)
    made.take(100)
    assert compute(made.take(100)) == [("a", 0, 100)]


def test_short_ones_and_a_long_one_take_turns() -> None:
    made = line(100, long=1000, a=80, b=80, c=80)
    taken = [compute(made.take(100)) for _ in range(7)]
    assert [[name for name, _, _ in step] for step in taken] == [
        ["a"],
        ["long"],
        ["b"],
        ["long"],
        ["c"],
        ["long"],
        ["long"],
    ]


def test_of_long_ones_the_shorter_is_first_but_not_always() -> None:
    made = line(100, long=3000)
    for name in "abcdefgh":
        made.add(stand_in(name, prompt=200))
    served = "".join(compute(made.take(100))[0][0][0] for _ in range(12))
    # Each third turn, at least, is the eldest's.
    assert served == "aalbblccldd" + "l"


def test_whoever_leaves_is_not_computed() -> None:
    made, gone = PrefillLine(100), stand_in("gone", prompt=500)
    made.add(gone)
    made.add(stand_in("b", prompt=10))
    made.discard(gone)
    assert compute(made.take(1000)) == [("b", 0, 10)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    chunk=st.integers(1, 40),
    data=st.data(),
    arrivals=st.lists(
        st.lists(st.integers(1, 100), max_size=4),  # prompts that join before this step
        min_size=1,
        max_size=25,
    ),
)
def test_bounds_hold_whoever_comes_later(chunk: int, data: st.DataObject, arrivals: list[list[int]]) -> None:
    made = PrefillLine(chunk)
    budgets = st.integers(1, 3 * chunk)
    least = data.draw(budgets)
    waited: dict[Sequence, int] = {}
    bound: dict[Sequence, int] = {}
    long: list[Sequence] = []
    long_left_out = eldest_left_out = 0
    plan, count = iter(arrivals), 0
    while (joining := next(plan, None)) is not None or len(made):
        for length in joining or ():
            sequence = stand_in(str(count), prompt=length)
            count += 1
            before = sum(s.prompt_length for s in waited)
            made.add(sequence)
            if length > chunk:
                long.append(sequence)
            else:
                waited[sequence] = 0
                b = min(least, chunk)
                bound[sequence] = 2 * (1 + before // max(1, b - length + 1))
        chunks = made.take(data.draw(st.integers(least, 3 * chunk)))
        if not len(made):
            assert not chunks
            continue
        assert chunks
        served = {c.sequence for c in chunks}
        assert len(served) == len(chunks)
        for c in chunks:
            assert c.start == c.sequence.computed
            assert c.end in {(c.start // chunk + 1) * chunk, c.sequence.prompt_length}
            assert c.end - c.start <= chunk
        if long:
            long_left_out = 0 if served & set(long) else long_left_out + 1
            eldest_left_out = 0 if long[0] in served else eldest_left_out + 1
            assert long_left_out < 2
            assert eldest_left_out < 4
        compute(chunks)
        waited = {s: steps + 1 for s, steps in waited.items()}
        assert all(steps <= bound[s] for s, steps in waited.items())
        waited = {s: steps for s, steps in waited.items() if s.computed < s.prompt_length}
        long = [s for s in long if s.computed < s.prompt_length]
