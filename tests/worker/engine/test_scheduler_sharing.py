"""Equal beginnings of prompts are computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scheduler_driver import chunks, compute, fill, scheduler
from stand_in_sequence import FOREVER, names, stand_in
from streamfleet_worker.engine.prefix_cache import BLOCK, PrefixCache

if TYPE_CHECKING:
    from streamfleet_worker.engine.sequence import Sequence


def shared(name: str, tokens: int, rest: int, **settings: Any) -> Sequence:
    """A prompt whose first tokens, whole blocks, are everybody's."""
    assert tokens % BLOCK == 0
    own = stand_in(name, prompt=rest).prompt_token_ids
    return stand_in(name, prompt=(*range(tokens), *own), **settings)


def test_choices_of_a_request_compute_their_prompt_once() -> None:
    prefix = PrefixCache(1000)
    made = scheduler(prefix=prefix, prefill_chunk=64, max_prefill_tokens=1000)
    prompt = tuple(range(200))
    for index in range(4):
        made.add(stand_in("a", prompt=prompt, index=index))
    seen = []
    for _ in range(6):
        plan = compute(made.schedule(1.0), prefix)
        seen.append([(c.sequence.index, c.start, c.end) for c in plan.chunks])
    assert seen == [
        [(0, 0, 64)],
        [(0, 64, 128)],
        [(0, 128, 192)],
        # Whole blocks are there, and the rest of eight tokens is each one's own.
        [(index, 192, 200) for index in (1, 2, 3, 0)],
        [],
        [],
    ]
    assert (prefix.tokens_asked, prefix.tokens_found) == (4 * 200, 3 * 192)


def test_who_stands_back_is_neither_counted_nor_passed_and_its_turn_comes_with_the_block() -> None:
    prefix = PrefixCache(1000)
    made = scheduler(
        prefix=prefix, prefill_chunk=64, max_batch_size=20, max_waiting_s=FOREVER, max_overtakes=0
    )
    fill(made, 4)
    made.add(shared("first", tokens=128, rest=9))
    made.add(shared("second", tokens=128, rest=9))
    made.add(stand_in("other"))
    assert names(compute(made.schedule(1.0), prefix).admitted) == ["first", "other"]
    assert names(compute(made.schedule(1.0), prefix).admitted) == []
    assert names(compute(made.schedule(1.0), prefix).admitted) == []
    assert chunks(compute(made.schedule(1.0), prefix)) == [("second", 128, 137), ("first", 128, 137)]
    made.add(stand_in("a"))
    made.add(stand_in("b"))
    assert names(made.schedule(1.0).admitted) == []  # 2 < ceil(0.3 * 7)


def test_it_goes_on_with_what_is_there_when_the_computing_one_leaves() -> None:
    prefix = PrefixCache(1000)
    made = scheduler(prefix=prefix, prefill_chunk=64)
    made.add(shared("first", tokens=128, rest=9))
    made.add(shared("second", tokens=128, rest=9))
    assert chunks(compute(made.schedule(1.0), prefix)) == [("first", 0, 64)]
    assert compute(made.schedule(1.0), prefix).admitted == []
    made.remove(("first", 1))
    assert chunks(compute(made.schedule(1.0), prefix)) == [("second", 128, 137)]
    assert prefix.tokens_found == 128


def test_one_that_leaves_while_it_stands_back_is_forgotten() -> None:
    prefix = PrefixCache(1000)
    made = scheduler(prefix=prefix, prefill_chunk=64, max_waiting_s=FOREVER)
    fill(made, 4)
    made.add(shared("first", tokens=128, rest=9))
    made.add(shared("second", tokens=128, rest=9))
    assert names(compute(made.schedule(1.0), prefix).admitted) == ["first"]
    made.remove(("second", 1))
    for _ in range(3):
        compute(made.schedule(1.0), prefix)
    made.add(stand_in("a"))
    assert names(compute(made.schedule(1.0), prefix).admitted) == []  # 1 < ceil(0.3 * 5)


def test_it_goes_on_when_the_cache_could_not_keep_the_block() -> None:
    prefix = PrefixCache(1)  # one block
    made = scheduler(prefix=prefix, prefill_chunk=64, max_prefill_tokens=1000)
    made.add(shared("first", tokens=128, rest=9))
    made.add(shared("second", tokens=128, rest=9))
    assert chunks(compute(made.schedule(1.0), prefix)) == [("first", 0, 64)]
    # The second block is computed and not there: nobody will bring it.
    assert chunks(compute(made.schedule(1.0), prefix)) == [("first", 64, 128), ("second", BLOCK, 64)]


def test_nobody_stands_back_for_less_than_a_block() -> None:
    prefix = PrefixCache(1000)
    made = scheduler(prefix=prefix, max_prefill_tokens=1000)
    prompt = tuple(range(BLOCK))  # a token at least is computed: so none of its blocks can be shared
    for index in range(2):
        made.add(stand_in("a", prompt=prompt, index=index))
    assert len(compute(made.schedule(1.0), prefix).admitted) == 2


def test_what_is_scored_is_computed() -> None:
    prefix = PrefixCache(1000)
    made = scheduler(prefix=prefix, max_prefill_tokens=1000)
    made.add(shared("first", tokens=128, rest=9, scored_from=1))
    made.add(shared("second", tokens=128, rest=9, scored_from=65))
    made.add(shared("third", tokens=128, rest=9, scored_from=1))
    # The second waits for 64 tokens of the first; the third has no use for them.
    assert chunks(compute(made.schedule(1.0), prefix)) == [("first", 0, 137), ("third", 0, 137)]
    assert chunks(compute(made.schedule(1.0), prefix)) == [("second", 64, 137)]


def test_a_prefix_cache_that_is_off_makes_nobody_wait() -> None:
    made = scheduler(prefix=PrefixCache(0), max_prefill_tokens=1000)
    made.add(shared("first", tokens=128, rest=9))
    made.add(shared("second", tokens=128, rest=9))
    assert chunks(made.schedule(1.0)) == [("first", 0, 137), ("second", 0, 137)]
