"""Stop strings, ends, and what is shown when; the right text is told by hand or by another rule."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine.detokenizer import Detokenizer, StopMatcher
from streamfleet_worker.engine.incremental_decoder import WindowDecoder
from streamfleet_worker.engine.prepared import Prepared
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import build_tokenizer
from tiny_tokenizers import BOS, EOS, FIRST_BYTE, FIRST_WORD, byte_level_of, sentencepiece_like


def scripted(texts: Sequence[str], **options: Any) -> Detokenizer:
    """One whose tokens, numbered from 0, have these texts."""
    return Detokenizer(WindowDecoder(lambda ids: "".join(texts[i] for i in ids)), **options)


def prepared(prompt: Sequence[int] = (BOS,), **fields: Any) -> Prepared:
    return Prepared(prompt_token_ids=tuple(prompt), max_tokens=100, sampling=Sampling(), **fields)


def stream(ids: Sequence[int], detokenizer: Detokenizer) -> tuple[list[str], bool]:
    shown = []
    for token_id in ids:
        text, stopped = detokenizer.push(token_id)
        shown.append(text)
        if stopped:
            return shown, True
    text, stopped = detokenizer.flush()
    shown[-1] += text
    return shown, stopped


@pytest.mark.parametrize(
    ("tokens", "stops", "include", "shown", "stopped"),
    [
        ([" Paris", "."], ["Pari"], False, [" "], True),
        ([" not", "!"], ["ot"], False, [" n"], True),
        ([" not", "!"], ["ot"], True, [" not"], True),
        (["1", "2", "3"], ["2"], False, ["1", ""], True),
        (["1", "2", "3"], ["2"], True, ["1", "2"], True),
        (["AB", "CD", "EF", "GH"], ["DEFG"], False, ["AB", "C", "", ""], True),
        (["AB", "CD", "EF", "GH"], ["DEFG"], True, ["AB", "C", "", "DEFG"], True),
        (["AB", "CD", "EF", "XY"], ["DEFG"], False, ["AB", "C", "", "DEFXY"], False),
        (["AB", "CD", "EF"], ["DEFG"], False, ["AB", "C", "DEF"], False),
        # A held text that turns out harmless still may hide the beginning of the next stop.
        (["aa", "ab"], ["aab"], False, ["", "a"], True),
        (["xabab", "abac"], ["ababac"], False, ["x", "ab"], True),
        # Of several stops the first to be complete wins, of those complete at once the longest.
        (["one two"], ["two", "ne"], False, ["o"], True),
        (["a--b"], ["-", "--"], False, ["a"], True),
        (["a", "bc"], ["bc", "abc"], False, ["", ""], True),
        (["text"], [], False, ["text"], False),
    ],
)
def test_stop_strings(
    tokens: list[str], stops: list[str], include: bool, shown: list[str], stopped: bool
) -> None:
    detokenizer = scripted(tokens, stops=stops, include_stop=include)
    assert stream(range(len(tokens)), detokenizer) == (shown, stopped)


def naive(tokens: Sequence[str], stops: Sequence[str], include: bool, min_tokens: int) -> tuple[str, bool]:
    """The rule told differently: read character by character until the text ends in a stop."""
    text = ""
    for number, token in enumerate(tokens, 1):
        for character in token:
            text += character
            met = [stop for stop in stops if text.endswith(stop)]
            if met and number >= min_tokens:
                return text if include else text[: -max(map(len, met))], True
    return text, False


@settings(max_examples=1000, deadline=None)
@given(
    tokens=st.lists(st.text("ab", max_size=4), min_size=1, max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
)
def test_stops_do_not_depend_on_where_tokens_begin_and_no_more_is_held_than_needed(
    tokens: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    matcher = StopMatcher(stops, include)
    beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
    shown, stopped, read = "", False, ""
    for number, token in enumerate(tokens, 1):
        text, stopped = matcher.push(token, may_stop=number >= min_tokens)
        read += token
        shown += text
        if stopped:
            break
        needed = max((len(b) for b in beginnings if read.endswith(b)), default=0)
        assert (shown, len(read) - len(shown)) == (read[: len(shown)], needed)
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped) == naive(tokens, stops, include, min_tokens)


@pytest.mark.parametrize(
    ("tokens", "stops", "min_tokens", "shown", "stopped"),
    [
        # Complete with the second token: too early for a least of three, in time for one of two.
        (["a", "END", "b"], ["END"], 3, ["a", "END", "b"], False),
        (["a", "END", "b"], ["END"], 2, ["a", ""], True),
        # Begun before the least, complete after it.
        (["aE", "ND", "b"], ["END"], 2, ["a", ""], True),
        # The early one is text, the later one ends it.
        (["x,", "y", ",z"], [","], 3, ["x,", "y", ""], True),
        # An early end within a longer beginning does not count once the longer one has come to nothing.
        (["abc", "x", "d"], ["b", "abcd"], 2, ["", "abcx", "d"], False),
        # The end of an early one may begin another.
        (["aa", "a", "c"], ["aa"], 2, ["a", ""], True),
    ],
)
def test_a_stop_that_is_complete_before_the_least_number_of_tokens_is_text(
    tokens: list[str], stops: list[str], min_tokens: int, shown: list[str], stopped: bool
) -> None:
    detokenizer = scripted(tokens, stops=stops, min_tokens=min_tokens)
    assert stream(range(len(tokens)), detokenizer) == (shown, stopped)


def test_a_stop_over_the_tokens_of_a_real_tokenizer() -> None:
    tokenizer = Tokenizer(build_tokenizer())
    ids = tokenizer.encode("def decode(self, s): return value")
    shown, stopped = stream(ids, Detokenizer.of(tokenizer, prepared(stop=("f, s)",))))
    assert ("".join(shown), stopped) == ("def decode(sel", True)


def test_many_stops_that_repeat_themselves_are_found_where_a_search_finds_them() -> None:
    source = random.Random(4)
    stops = [("a" * n) + "b" for n in (8, 16, 32, 63)]
    text = "".join("a" * source.randrange(60) + source.choice("bc") for _ in range(40)).replace(
        "a" * 8 + "b", "c"
    )
    text += "a" * 40 + "b"
    shown, stopped = stream(range(len(text)), scripted(text, stops=stops))
    assert ("".join(shown), stopped) == (text[:-33], True)


# --- ends


def test_an_end_from_outside_gives_what_was_held_back() -> None:
    detokenizer = scripted(["so EN"], stops=["END"])
    assert detokenizer.push(0) == ("so ", False)
    assert detokenizer.end() == "EN"
    assert detokenizer.end() == ""


def test_an_unfinished_character_becomes_one_mark_at_every_end() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    emoji = [FIRST_BYTE + byte for byte in "😀".encode()]
    ends: list[Callable[[Detokenizer], str]] = [
        lambda d: d.flush()[0],
        lambda d: d.flush(EOS)[0],
        lambda d: d.end(),
    ]
    for finish in ends:
        for count in (1, 2, 3):
            detokenizer = Detokenizer.of(tokenizer, prepared())
            assert [detokenizer.push(token_id)[0] for token_id in emoji[:count]] == [""] * count
            assert finish(detokenizer) == "\ufffd"


def test_nothing_is_shown_after_the_end() -> None:
    stopped = scripted(["a", "b"], stops=["b"])
    assert [stopped.push(0), stopped.push(1)] == [("a", False), ("", True)]
    assert stopped.end() == ""
    tokenizer = Tokenizer(byte_level_of([b"b\xf0"]))
    stopped_within = Detokenizer.of(tokenizer, prepared(stop=("b",)))
    assert stopped_within.push(2) == ("", True)
    assert stopped_within.end() == ""
    flushed = scripted(["a"])
    assert flushed.push(0) == ("a", False)
    assert flushed.flush() == ("", False)
    assert flushed.end() == ""


def test_a_held_text_that_a_broken_character_completes_to_a_stop_is_one() -> None:
    tokenizer = Tokenizer(byte_level_of(["a", b"\xf0"]))
    for include, text in ((False, ""), (True, "a\ufffd")):
        detokenizer = Detokenizer.of(tokenizer, prepared(stop=("a\ufffd",), include_stop=include))
        assert [detokenizer.push(2), detokenizer.push(3)] == [("", False), ("", False)]
        assert detokenizer.flush() == (text, True)


@pytest.mark.parametrize(
    ("skip", "include", "end_of_text", "newline"),
    # What the last token adds: "</s>", a control token, or "\n", an ordinary token given as an end.
    [(True, False, "", ""), (True, True, "", "\n"), (False, False, "</s>", ""), (False, True, "</s>", "\n")],
)
def test_the_token_that_ends_a_text_is_shown_if_control_tokens_or_stops_are(
    skip: bool, include: bool, end_of_text: str, newline: str
) -> None:
    tokenizer = Tokenizer(byte_level_of(["Hi", "\n"]))
    for token_id, text in ((EOS, end_of_text), (3, newline)):
        wish = prepared(skip_special_tokens=skip, include_stop=include)
        detokenizer = Detokenizer.of(tokenizer, wish)
        assert detokenizer.push(2) == ("Hi", False)
        assert detokenizer.flush(token_id) == (text, False)


def test_a_stop_string_may_spell_a_control_token_that_is_shown() -> None:
    tokenizer = Tokenizer(byte_level_of(["Hi"]))
    detokenizer = Detokenizer.of(tokenizer, prepared(skip_special_tokens=False, stop=("</s>",)))
    assert detokenizer.push(2) == ("Hi", False)
    assert detokenizer.flush(EOS) == ("", True)


# --- the prompt before it


def test_a_prompt_comes_before_the_first_token_and_no_stop_is_found_in_it() -> None:
    options = {"prefix": "stop here: ", "stops": ["stop", ": a"]}
    assert stream([0, 1], scripted(["a", "b"], **options)) == (["stop here: a", "b"], False)
    assert stream([0, 1], scripted(["a s", "top"], **options)) == (["stop here: a ", ""], True)
    assert stream([0], scripted(["stop"], **options)) == (["stop here: "], True)


def test_a_prompt_comes_before_an_answer_of_no_tokens_but_the_ending_one() -> None:
    assert scripted([], prefix="so").flush() == ("so", False)
    nothing_came = scripted(["a"], prefix="so")
    assert nothing_came.end() == ""
    held = scripted(["a"], prefix="so", stops=["ab"])
    assert held.push(0) == ("so", False)
    assert held.end() == "a"


def test_the_answer_to_a_prompt_that_is_shown_goes_on_with_its_spaces() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    hello, there, world = FIRST_WORD + 1, FIRST_WORD + 2, FIRST_WORD + 3
    wish = prepared([BOS, hello, there], prefix="Hello there")
    assert stream([world], Detokenizer.of(tokenizer, wish)) == (["Hello there world"], False)
