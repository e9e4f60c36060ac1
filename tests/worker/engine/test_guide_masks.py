"""Masks against brute force: a token is allowed if and only if the answer with it can still become right."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from guide_walk import allowed
from streamfleet_common import schemas
from streamfleet_common.errors import GenerationFailed
from streamfleet_worker.engine import guide_matcher
from streamfleet_worker.engine.guide_compiler import GuideCompiler
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import VOCAB_SIZE, build_tokenizer
from tiny_tokenizers import BOS, EOS, FIRST_BYTE, byte_level_of, metaspace, sentencepiece_like, word_piece

# Among them parts of characters, tokens over the borders of what a form asks for, and two of one spelling.
TEXTS: list[str | bytes] = [
    *(chr(code) for code in range(32, 127)),
    *("aa", "ab", "ba", "abc", "bab", "aab", "1.", ".2", "12", "0", "yes", "no", "ye", "es,", "n", "o", " y"),
    *(b"\xc3", b"\xa9", b"\xe6", b"\xbc\xa2", b"\xa2x", b"x\xc3", b"\xa9\xc3", "é", "漢", "éé", "\n", "a"),
    *('{"', '":', '"}', '":1', ',"', '{"a":', "true", "null", "[[", "]]", "[]", '",', "-", "-1", "e5", ".5"),
]


def byte_compiler(vocab_size: int = 200) -> tuple[GuideCompiler, list[bytes], int]:
    """A compiler for the tokens of `TEXTS`, the bytes of each token, and the size of the vocabulary."""
    source = byte_level_of(list(dict.fromkeys(TEXTS)))
    tokens = [b"", b"", *(t if isinstance(t, bytes) else t.encode() for t in dict.fromkeys(TEXTS))]
    tokens += [b""] * (vocab_size - len(tokens))
    return GuideCompiler(Tokenizer(source), vocab_size, {EOS}), tokens, vocab_size


def compare(
    guide: Any, tokens: list[bytes], can_follow: Callable[[bytes], bool], is_whole: Callable[[bytes], bool]
) -> int:
    """Walk at random, and look at every mask on the way; how many there were."""
    seen = set()
    for seed in range(12):
        chance = random.Random(seed)
        matcher, text = guide.matcher(), b""
        while len(text) < 40:
            seen.add(text)
            found = allowed(matcher, len(tokens))
            wanted = [i for i, token in enumerate(tokens) if token and can_follow(text + token)]
            assert sorted(found) == sorted(wanted + [EOS] * is_whole(text)), text
            if not wanted:
                break
            token_id = chance.choice(wanted)
            matcher.accept(token_id)
            text += tokens[token_id]
    return len(seen)


def words(*options: str) -> tuple[Callable[[bytes], bool], Callable[[bytes], bool]]:
    """A recogniser of some words: what can become one, and what is one."""
    spelled = [option.encode() for option in options]
    return lambda text: any(word.startswith(text) for word in spelled), lambda text: text in spelled


@pytest.mark.parametrize(
    "options",
    [
        ("yes", "no", "yes, no"),
        ("a", "ab", "abc", "abab"),
        ("é", "éé", "漢", "x漢é", "漢x"),
        ("12", "1.2", "0"),
        ('{"a":1}', '{"a":true}'),
    ],
)
def test_masks_of_a_choice(options: tuple[str, ...]) -> None:
    compiler, tokens, _ = byte_compiler()
    guide = compiler.compile(schemas.Guide(choice=options))
    assert compare(guide, tokens, *words(*options)) > 3


# Each beside what may stand at the start of a match, written by hand: a regular expression of its own.
REGEXES = {
    "(ab|ba)*": "(ab|ba)*(a|b)?",
    "a+b?c{2,3}": "a*|a+b?c{0,3}",
    r"\d{1,3}\.\d": r"\d{0,3}|\d{1,3}\.\d?",
    "(a|b)*a(a|b){2}": "(a|b)*",
    "[^a-z]{2}": "[^a-z]{0,2}",
    "x.{0,2}x|no+": "(x.{0,2}x?|no*)?",
}


@pytest.mark.parametrize("regex", REGEXES)
def test_masks_of_a_regular_expression(regex: str) -> None:
    compiler, tokens, _ = byte_compiler()
    start = REGEXES[regex]

    def can_follow(text: bytes) -> bool:
        # A character that has only begun may become any of those that begin so.
        for tail in (b"", b"\xa9", b"\xbc\xa2", b"\xa2"):
            try:
                whole = (text + tail).decode()
            except UnicodeDecodeError:
                continue
            if re.fullmatch(start, whole, re.ASCII):
                return True
        return False

    def is_whole(text: bytes) -> bool:
        try:
            return bool(re.fullmatch(regex, text.decode(), re.ASCII))
        except UnicodeDecodeError:
            return False

    guide = compiler.compile(schemas.Guide(regex=regex))
    assert compare(guide, tokens, can_follow, is_whole) > 10


def test_masks_of_a_schema() -> None:
    # Without spaces of any kind among the tokens, the language is small enough to be written down.
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 12, None, "yes", "é"]}, "b": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    values = ("1", "12", "null", '"yes"', '"é"')
    documents = [f'{{"a":{value}{rest}}}' for value in values for rest in ("", ',"b":true', ',"b":false')]
    compiler, tokens, _ = byte_compiler()
    tokens = [b"" if set(token) & set(b" \n") else token for token in tokens]
    guide = compiler.compile(schemas.Guide(json_schema=schema))
    can_follow, is_whole = words(*documents)

    class WithoutSpaces:
        def __init__(self) -> None:
            self.inner = guide.matcher()
            self.accept = self.inner.accept

        def fill(self, bitmask: torch.Tensor) -> None:
            self.inner.fill(bitmask)
            for i, token in enumerate(tokens):
                if not token and i != EOS:
                    bitmask[i // 32] &= ~(1 << i % 32) if i % 32 < 31 else 0x7FFFFFFF

    class Guide:
        matcher = WithoutSpaces

    assert compare(Guide(), tokens, can_follow, is_whole) > 10


# --- ends, control tokens, and what is no token


def test_only_the_ends_are_allowed_once_nothing_else_can_follow() -> None:
    tokenizer = Tokenizer(build_tokenizer())
    compiler = GuideCompiler(tokenizer, VOCAB_SIZE, {0, 2, VOCAB_SIZE + 5})
    for form in ({"choice": ("yes",)}, {"regex": "yes"}, {"json_schema": {"const": "yes"}}):
        matcher = compiler.compile(schemas.Guide.model_validate(form)).matcher()
        text = '"yes"' if "json_schema" in form else "yes"
        for token_id in tokenizer.encode_piece(text):
            found = allowed(matcher, VOCAB_SIZE)
            assert token_id in found
            assert not {0, 2} & set(found)
            matcher.accept(token_id)
        assert allowed(matcher, VOCAB_SIZE) == [0, 2]
        matcher.accept(2)


def test_an_end_may_come_where_the_form_is_complete_and_may_go_on() -> None:
    compiler, tokens, size = byte_compiler()
    matcher = compiler.compile(schemas.Guide(choice=("a", "ab"))).matcher()
    matcher.accept(tokens.index(b"a"))
    assert allowed(matcher, size) == sorted([EOS, tokens.index(b"b")])


@pytest.mark.parametrize(
    "form", [{"json_schema": {}}, {"regex": "(?s:.)*"}, {"json_schema": {"type": "string"}}]
)
def test_control_tokens_and_ids_that_are_no_token_are_never_allowed(form: dict[str, Any]) -> None:
    tokenizer = Tokenizer(build_tokenizer())
    size = VOCAB_SIZE + 40
    guide = GuideCompiler(tokenizer, size, {2}).compile(schemas.Guide.model_validate(form))
    matcher = guide.matcher()
    for text in ('"', "a<|im", "_", "end|>"):
        for token_id in tokenizer.encode_piece(text):
            assert not set(allowed(matcher, size)) & {0, 1, *range(VOCAB_SIZE, size)}
            assert (2 in allowed(matcher, size)) == ("regex" in form)
            matcher.accept(token_id)


def test_an_end_that_the_tokenizer_takes_for_text_ends_no_string() -> None:
    # Of some converted models the end is spelled like text, and not marked.
    tokens = ["x", '"', "</s>", "<", "/s>"]
    tokenizer = Tokenizer(byte_level_of(tokens))
    end = 2 + tokens.index("</s>")
    matcher = (
        GuideCompiler(tokenizer, 7, {end}).compile(schemas.Guide(json_schema={"type": "string"})).matcher()
    )
    matcher.accept(3)
    assert allowed(matcher, 7) == [2, 3, 5, 6]
    matcher.accept(3)
    assert allowed(matcher, 7) == [end]


def test_words_bytes_and_spaces_of_other_kinds_of_tokenizers() -> None:
    def first(source: Any, option: str) -> list[int]:
        return allowed(
            GuideCompiler(Tokenizer(source), 300, {EOS}).compile(schemas.Guide(choice=(option,))).matcher(),
            300,
        )

    ids = sentencepiece_like().get_vocab()
    assert first(sentencepiece_like(), "xé") == [ids["x"], FIRST_BYTE + ord("x")]
    assert set(first(sentencepiece_like(), " Hello")) >= {ids["▁"], ids["▁Hello"]}
    assert first(sentencepiece_like(), "漢") == [ids["漢"], FIRST_BYTE + 0xE6]
    ids = metaspace().get_vocab()
    assert set(first(metaspace(), " there")) == {ids["▁"], ids["▁the"], ids["▁there"]}
    ids = word_piece().get_vocab()
    assert first(word_piece(), " worlds") == [ids["world"]]
    assert BOS not in ids.values() or EOS not in first(word_piece(), " worlds")


# --- one row's fault


def test_a_token_that_does_not_fit_fails_its_row_alone() -> None:
    compiler, tokens, size = byte_compiler()
    guide = compiler.compile(schemas.Guide(regex="ab*c"))
    good, bad = guide.matcher(), guide.matcher()
    for matcher in (good, bad):
        matcher.accept(tokens.index(b"a"))
    with pytest.raises(GenerationFailed, match="behind 1 tokens"):
        bad.accept(tokens.index(b"x"))
    for text in (b"b", b"b", b"c"):
        good.accept(tokens.index(text))
    assert allowed(good, size) == [EOS]
    with pytest.raises(GenerationFailed):
        guide.matcher().accept(EOS)


def test_a_row_that_fills_the_memory_of_its_guide_fails_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guide_matcher._LIMITS, "max_lexer_states", 3000)
    compiler, tokens, size = byte_compiler()
    guide = compiler.compile(schemas.Guide(regex="a{0,2000}b|[^a]{0,2000}"))
    a, x = tokens.index(b"a"), tokens.index(b"x")
    matchers = [guide.matcher() for _ in range(3)]
    # Far more states than one memory holds, over all; so each has to begin anew on the way.
    for place in range(700):
        for matcher, token_id in zip(matchers, (a, x, a), strict=True):
            assert (EOS in allowed(matcher, size)) == (token_id == x or place == 0)
            matcher.accept(token_id)
    # And one that comes later finds a guide as good as new.
    late = guide.matcher()
    late.accept(a)
    assert tokens.index(b"b") in allowed(late, size)


def test_a_row_that_needs_more_than_any_memory_holds_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guide_matcher._LIMITS, "max_lexer_states", 1000)
    compiler, tokens, size = byte_compiler()
    guide = compiler.compile(schemas.Guide(regex="a{0,4000}b"))
    matcher = guide.matcher()

    def go_on() -> None:
        for _ in range(4000):
            allowed(matcher, size)
            matcher.accept(tokens.index(b"a"))

    with pytest.raises(GenerationFailed, match=r"behind \d+ tokens.* bound its repetitions") as caught:
        go_on()
    assert "aaa" not in str(caught.value)
    assert tokens.index(b"a") in allowed(guide.matcher(), size)
