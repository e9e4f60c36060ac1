"""Text against independent sources: the UTF-8 of the text itself, and the tokenizer's own decoding."""

import random
from collections.abc import Callable, Sequence

import pytest
import tokenizers

from streamfleet_worker.engine.detokenizer import Detokenizer, IncrementalDecoder, StopMatcher
from streamfleet_worker.engine.models import LoadedModel
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import build_tokenizer

HARD_TEXTS = [
    "Hello there world",
    "a 😀 b 👩‍👩‍👧‍👦 c 🇩🇪🇫🇷",
    "삼겹살 ď naïve 漢字かな交じり文",
    "  leading, trailing  \n\n\ttabs ",
    "e\u0301 combining, \u200b zero width, \ufffd a real replacement mark.",
    "x" * 40,
]


def decoder_of(texts: Sequence[str]) -> Callable[[Sequence[int]], str]:
    return lambda ids: "".join(texts[i] for i in ids)


def bytes_decoder(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


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


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(build_tokenizer())


@pytest.fixture(scope="module")
def sentencepiece_like() -> tokenizers.Tokenizer:
    """The Llama-2 kind: a "▁" for each space, bytes as fall-back, the first space of a text dropped."""
    words = ["▁Hello", "▁there", "▁world", "▁", "x", "<s>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return made


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_byte_by_byte_text_comes_out_whole_and_only_in_whole_characters(text: str) -> None:
    shown, _ = stream(list(text.encode()), Detokenizer(bytes_decoder))
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown).replace("\ufffd a real", "")


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_byte_level_tokens(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    context = byte_level.encode("Before it: ")
    shown, _ = stream(ids, Detokenizer(byte_level.decode, context))
    assert "".join(shown) == text


def test_random_tokens_give_what_the_tokenizer_gives_for_all_at_once(byte_level: Tokenizer) -> None:
    source = random.Random(5)
    for _ in range(300):
        ids = [source.randrange(3, 300) for _ in range(source.randint(1, 30))]
        shown, _ = stream(ids, Detokenizer(byte_level.decode))
        assert "".join(shown) == byte_level.decode(ids)


def test_an_emoji_cut_by_the_length_limit_leaves_one_mark() -> None:
    shown, _ = stream(list("a😀".encode())[:3], Detokenizer(bytes_decoder))
    assert shown == ["a", "", "\ufffd"]


def test_the_first_token_keeps_its_leading_space(sentencepiece_like: tokenizers.Tokenizer) -> None:
    shown, _ = stream([1, 2], Detokenizer(sentencepiece_like.decode, context=[0]))
    assert shown == [" there", " world"]
    shown, _ = stream([0, 1, 2], Detokenizer(sentencepiece_like.decode))
    assert shown == ["Hello", " there", " world"]


def test_byte_fall_back_tokens_wait_for_the_whole_character(
    sentencepiece_like: tokenizers.Tokenizer,
) -> None:
    ids = [0, *(6 + byte for byte in "é你😀".encode()), 1]
    shown, _ = stream(ids, Detokenizer(sentencepiece_like.decode))
    assert shown == ["Hello", "", "é", "", "", "你", "", "", "", "😀", " there"]


def test_special_tokens_have_no_text_and_take_none_along(byte_level: Tokenizer) -> None:
    hello, world = byte_level.encode("hello"), byte_level.encode(" world")
    shown, _ = stream([1, *hello, 0, *world, 2], Detokenizer(byte_level.decode))
    assert "".join(shown) == "hello world"
    assert byte_level.context([*hello, 1, 0]) == hello


def test_a_character_begun_in_the_prompt_is_shown_once_it_is_whole() -> None:
    begun = list("😀".encode())
    shown, _ = stream([*begun[2:], ord("!")], Detokenizer(bytes_decoder, context=[65, *begun[:2]]))
    assert shown == ["", "😀", "!"]


def test_a_flushed_decoder_has_nothing_more() -> None:
    decoder = IncrementalDecoder(bytes_decoder)
    assert decoder.push(0xF0) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


@pytest.mark.parametrize(
    ("tokens", "stops", "include", "shown", "stopped"),
    [
        ([" Paris", "."], ["Pari"], False, [" "], True),
        ([" not", "!"], ["ot"], False, [" n"], True),
        ([" not", "!"], ["ot"], True, [" not"], True),
        (["1", "2", "3"], ["2"], False, ["1", ""], True),
        (["1", "2", "3"], ["2"], True, ["1", "2"], True),
        (["AB", "CD", "EF", "GH"], ["DEFG"], False, ["AB", "C", "", ""], True),
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
    detokenizer = Detokenizer(decoder_of(tokens), stops=stops, include_stop=include)
    assert stream(range(len(tokens)), detokenizer) == (shown, stopped)


def naive(text: str, stops: Sequence[str], include: bool) -> tuple[str, bool]:
    """The rule told differently: read character by character until the text ends in a stop."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end if include else end - max(map(len, met))], True
    return text, False


def test_stops_do_not_depend_on_where_tokens_begin_and_hold_back_no_more_than_needed() -> None:
    source = random.Random(6)
    for _ in range(2000):
        text = "".join(source.choice("ab") for _ in range(source.randint(1, 14)))
        stops = ["".join(source.choice("ab") for _ in range(source.randint(2, 5))) for _ in range(2)]
        include = source.random() < 0.5
        matcher = StopMatcher(stops, include)
        shown, stopped, place = "", False, 0
        while place < len(text) and not stopped:
            size = source.randint(1, 4)
            piece, place = text[place : place + size], place + size
            more, stopped = matcher.push(piece)
            shown += more
            if not stopped:
                held = text[:place].removeprefix(shown)
                beginnings = [s[:n] for s in stops for n in range(1, len(s))]
                needed = max((len(b) for b in beginnings if text[:place].endswith(b)), default=0)
                assert len(held) == needed
        if not stopped:
            shown += matcher.flush()
        assert (shown, stopped) == naive(text, stops, include)


def test_a_real_tokenizer_and_a_stop_over_its_tokens(llama: LoadedModel) -> None:
    ids = llama.tokenizer.encode("def decode(self, s): return value")
    detokenizer = Detokenizer(llama.tokenizer.decode, stops=["f, s)"])
    shown, stopped = stream(ids, detokenizer)
    assert ("".join(shown), stopped) == ("def decode(sel", True)
