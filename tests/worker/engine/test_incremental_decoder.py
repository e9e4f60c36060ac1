"""Text token by token, against the tokenizer's own decoding of all at once and the UTF-8 of the text."""

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfleet_worker.engine.incremental_decoder import (
    MAX_UNREAD,
    IncrementalDecoder,
    PieceDecoder,
    WindowDecoder,
)
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import build_tokenizer
from tiny_tokenizers import (
    BOS,
    EOS,
    FIRST_BYTE,
    FIRST_WORD,
    byte_level_of,
    byte_metaspace,
    metaspace,
    sentencepiece_like,
    suffixed,
    unigram,
    word_piece,
    words_only,
)

MAKERS = {
    "byte_level": build_tokenizer,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "suffixed": suffixed,
    "words_only": words_only,
    "sentencepiece_like": sentencepiece_like,
    "unigram": unigram,
    "byte_metaspace": byte_metaspace,
}
SOURCES = {name: make() for name, make in MAKERS.items()}
TOKENIZERS = {name: Tokenizer(source) for name, source in SOURCES.items()}
LOSSLESS = ["byte_level", "metaspace", "word_piece", "suffixed", "words_only"]
"""Their own decoders turn broken bytes, if there are any, into marks one by one."""
BYTE_TOKENS = ["sentencepiece_like", "unigram"]

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40) | st.text(
    st.sampled_from("é漢한😀🇩🇪👩\u200d\u0301\ufffd ab\n"), min_size=1, max_size=40
)

often = settings(max_examples=250, deadline=None)


def ids_of(name: str, max_size: int) -> st.SearchStrategy[list[int]]:
    """Any tokens, control tokens and two ids that are no token among them."""
    return st.lists(st.integers(0, len(SOURCES[name]) + 1), max_size=max_size)


def stream(decoder: IncrementalDecoder, ids: Sequence[int]) -> list[str]:
    shown = [decoder.push(token_id) for token_id in ids]
    return [*shown, decoder.flush()]


def whole_characters(read: bytes, text: str) -> str:
    """The longest beginning of the text whose UTF-8 has been read to its end."""
    shown = ""
    for character in text:
        if len((shown + character).encode()) > len(read):
            break
        shown += character
    return shown


@pytest.mark.parametrize("name", LOSSLESS)
@often
@given(data=st.data())
def test_any_tokens_behind_any_prompt_give_what_the_tokenizer_gives_for_all_at_once(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, ids = data.draw(ids_of(name, 8)), data.draw(ids_of(name, 24))
    skip = data.draw(st.booleans())
    first = tokenizer.decoder(skip_special=skip)
    before = "".join(map(first.push, prompt))

    shown = stream(tokenizer.decoder(prompt, skip_special=skip), ids)

    assert before + "".join(shown) == tokenizer.decode(prompt + ids, skip_special=skip)


@pytest.mark.parametrize("name", [*LOSSLESS, *BYTE_TOKENS, "byte_metaspace"])
@often
@given(data=st.data())
def test_an_encoded_text_comes_out_as_the_tokenizer_decodes_it_and_is_never_taken_back(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(data.draw(TEXTS))
    whole = tokenizer.decode(ids)

    shown = stream(tokenizer.decoder(), ids)

    assert "".join(shown) == whole
    for count in range(len(ids)):
        # All that is settled by now is shown: at most one character is waited for.
        so_far = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        assert len("".join(shown[:count]).rstrip("\ufffd")) >= len(so_far)


@often
@given(TEXTS)
def test_byte_level_text_is_the_text(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert "".join(stream(tokenizer.decoder(), tokenizer.encode(text))) == text


@often
@given(TEXTS, st.data())
def test_characters_are_shown_with_the_token_that_completes_them(text: str, data: st.DataObject) -> None:
    encoded, tokens = text.encode(), []
    while encoded:
        size = data.draw(st.integers(1, 5))
        tokens.append(encoded[:size])
        encoded = encoded[size:]
    distinct = list(dict.fromkeys(tokens))
    decoder = Tokenizer(byte_level_of(distinct)).decoder()

    read, shown = b"", ""
    for token in tokens:
        read += token
        shown += decoder.push(FIRST_WORD + distinct.index(token))
        assert shown == whole_characters(read, text)


@pytest.mark.parametrize("name", BYTE_TOKENS)
@often
@given(TEXTS)
def test_characters_in_byte_tokens_are_shown_with_the_last_of_them(name: str, text: str) -> None:
    decoder = TOKENIZERS[name].decoder([FIRST_WORD + 1])
    read, shown = b"", ""
    for byte in text.encode():
        read += bytes([byte])
        shown += decoder.push(FIRST_BYTE + byte)
        assert shown == whole_characters(read, text)


@pytest.mark.parametrize("name", BYTE_TOKENS)
@often
@given(data=st.data())
def test_broken_bytes_become_marks_one_by_one_and_leave_the_characters_beside_them(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    last = FIRST_BYTE + 255
    ids = data.draw(st.lists(st.integers(FIRST_WORD, last) | st.integers(FIRST_BYTE + 128, last)))
    expected, context = "", [FIRST_WORD + 1]
    before = tokenizer.decode(context)
    for is_bytes, run in groupby(ids, key=lambda i: i >= FIRST_BYTE):
        if is_bytes:
            expected += bytes(i - FIRST_BYTE for i in run).decode(errors="replace")
        else:
            expected += tokenizer.decode([*context, *run]).removeprefix(before)

    assert "".join(stream(tokenizer.decoder(context), ids)) == expected


def test_kinds_of_tokenizers_with_pieces_are_known() -> None:
    kinds = {name: type(tokenizer.decoder()) for name, tokenizer in TOKENIZERS.items()}
    windows = {name for name, kind in kinds.items() if kind is WindowDecoder}
    assert windows == {"suffixed", "words_only", "byte_metaspace"}
    assert {kinds[name] for name in kinds.keys() - windows} == {PieceDecoder}
    # Two spaces that a text begins with may belong to two tokens.
    assert type(Tokenizer(sentencepiece_like(dropped=2)).decoder()) is WindowDecoder


@pytest.mark.parametrize("name", ["sentencepiece_like", "metaspace"])
def test_the_first_token_loses_its_leading_space_only_where_no_text_is_before_it(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    hello, there, world = FIRST_WORD + 1, FIRST_WORD + 2, FIRST_WORD + 3
    assert stream(tokenizer.decoder([hello]), [there, world]) == [" there", " world", ""]
    assert stream(tokenizer.decoder([BOS, *[EOS] * 100]), [hello, there]) == ["Hello", " there", ""]
    shown = stream(tokenizer.decoder([BOS], skip_special=False), [hello, EOS])
    assert shown == [" Hello", "</s>", ""]


@pytest.mark.parametrize("name", ["word_piece", "suffixed", "sentencepiece_like"])
def test_tokens_without_text_take_no_space_along(name: str) -> None:
    tokenizer, nothing = TOKENIZERS[name], [BOS, 10**6] * 40
    one, two = FIRST_WORD + 1, FIRST_WORD + 2
    shown = stream(tokenizer.decoder(), [*nothing, one, *nothing, two])
    assert "".join(shown) == tokenizer.decode([one, two])


@pytest.mark.parametrize("begun", [1, 2, 3])
def test_a_character_begun_in_the_prompt_is_shown_once_it_is_whole(begun: int) -> None:
    tokenizer = Tokenizer(byte_level_of(["A", *(bytes([byte]) for byte in "😀".encode()), "!"]))
    a, emoji, mark = 2, [3, 4, 5, 6], 7
    context = [a, *emoji[:begun]]
    for decoder in (tokenizer.decoder(context), WindowDecoder(tokenizer.decode, context=context)):
        assert stream(decoder, [*emoji[begun:], mark]) == [*[""] * (3 - begun), "😀", "!", ""]


def test_added_tokens_may_be_spelled_in_characters_that_stand_for_no_byte() -> None:
    source = byte_level_of(["a"])
    source.add_special_tokens({"additional_special_tokens": ["<終▁>"]})
    source.add_tokens(["漢 字"])
    tokenizer, added = Tokenizer(source), [2, len(source) - 2, 2, len(source) - 1]
    for skip, text in ((True, "aa漢 字"), (False, "a<終▁>a漢 字")):
        assert "".join(stream(tokenizer.decoder(skip_special=skip), added)) == text
        assert source.decode(added, skip_special_tokens=skip) == text


def test_a_flushed_decoder_has_nothing_more() -> None:
    tokenizer = TOKENIZERS["unigram"]
    for decoder in (tokenizer.decoder(), WindowDecoder(tokenizer.decode)):
        assert decoder.push(FIRST_BYTE + 0xF0) == ""
        assert decoder.flush() == "\ufffd"
        assert decoder.flush() == ""


def test_two_bytes_that_are_half_of_a_surrogate_pair_are_two_broken_ones() -> None:
    tokenizer = Tokenizer(byte_level_of([b"\xed", b"\xa0", b"\x80", "a"]))
    for ids in ([2, 3], [2, 3, 4], [2, 3, 5], [2, 3, 2, 3]):
        shown = "".join(stream(tokenizer.decoder(), ids))
        assert shown == tokenizer.decode(ids)
        assert shown.count("\ufffd") == len(ids) - ids.count(5)


def test_bytes_that_never_make_a_character_are_not_hoarded() -> None:
    lead = FIRST_BYTE + 0xE5
    shown = stream(TOKENIZERS["unigram"].decoder(), [lead] * 500)
    assert shown == ["", *["\ufffd"] * 500]


def test_a_window_stays_small_whatever_comes() -> None:
    tokenizer, sizes = TOKENIZERS["byte_metaspace"], []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return tokenizer.decode(ids)

    shown = stream(WindowDecoder(decode), [FIRST_BYTE + 0xE5] * 500)

    # A window is what was shown last and what is not shown yet.
    assert max(sizes) == 2 * MAX_UNREAD
    assert "".join(shown) == "\ufffd" * 500
