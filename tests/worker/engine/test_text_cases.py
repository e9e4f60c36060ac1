"""What goes wrong with text and at the door elsewhere, and what is right: each told by hand.

The tokens are scripted, and a loop as small as can be stands for the engine.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamfleet_common.errors import InvalidRequest, TooLong
from streamfleet_common.schemas import GenerateRequest
from streamfleet_worker.engine.base import EngineInfo
from streamfleet_worker.engine.detokenizer import Detokenizer
from streamfleet_worker.engine.prepared import Prepared
from streamfleet_worker.engine.preparer import Preparer
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import build_tokenizer
from tiny_tokenizers import BOS, EOS, FIRST_WORD, byte_level_of, sentencepiece_like


def door(source: Any, max_seq_len: int = 2048) -> Callable[..., Prepared]:
    info = EngineInfo(
        model="tiny",
        revision="0",
        tasks=("generate",),
        device="cpu",
        precision="float32",
        max_batch_size=8,
        max_seq_len=max_seq_len,
        vocab_size=len(source),
    )
    preparer = Preparer(Tokenizer(source), info)
    return lambda **fields: preparer.prepare(GenerateRequest(**fields))


def run(
    source: Any, tokens: Sequence[int], eos: Sequence[int] = (EOS,), **fields: Any
) -> tuple[list[str], str]:
    """The deltas of an answer of these tokens, and why it ended."""
    prepared = door(source)(**{"prompt_token_ids": [BOS], **fields})
    detokenizer = Detokenizer.of(Tokenizer(source), prepared)
    deltas: list[str] = []
    for token_id in tokens:
        is_eos = token_id in eos and not prepared.ignore_eos
        if is_eos or token_id in prepared.stop_token_ids:
            return [*deltas, detokenizer.flush(token_id)[0]], "eos" if is_eos else "stop"
        text, stopped = detokenizer.push(token_id)
        deltas.append(text)
        if stopped:
            return deltas, "stop"
        if len(deltas) == prepared.max_tokens:
            rest, stopped = detokenizer.flush()
            return [*deltas[:-1], text + rest], "stop" if stopped else "length"
    raise AssertionError("the script is over before the answer")


def script(texts: Sequence[str | bytes]) -> tuple[Any, list[int]]:
    """A tokenizer with these tokens, and their ids in order."""
    distinct = list(dict.fromkeys(texts))
    return byte_level_of(distinct), [FIRST_WORD + distinct.index(text) for text in texts]


ALPHABET = ["D", "EF", "GHI", "JK", "LMN"]


# The first letters of a stop string were streamed before it was complete.
def test_no_part_of_a_stop_string_is_streamed() -> None:
    source, ids = script(["ABC", *ALPHABET])
    deltas, reason = run(source, ids, stop=["DEFGHIJ"])
    assert (deltas, reason) == (["ABC", "", "", "", ""], "stop")


# What had been held back as a possible stop string came late, or never.
@pytest.mark.parametrize(
    ("stop", "deltas"),
    [
        ("DEFGHX", ["", "", "DEFGHI", "JK", "LMN"]),  # come to nothing with the third token
        ("LMNO", ["D", "EF", "GHI", "JK", "LMN"]),  # still possible at the end
        ("IJKLX", ["D", "EF", "GH", "", "IJKLMN"]),
    ],
)
def test_held_back_text_is_shown_as_soon_as_it_can_be_no_stop(stop: str, deltas: list[str]) -> None:
    source, ids = script(ALPHABET)
    assert run(source, ids, stop=[stop], max_tokens=5) == (deltas, "length")


# A stop string was seen only where it ended with a token.
@pytest.mark.parametrize(
    ("tokens", "stop", "text"), [([" Paris", "."], "Pari", " "), ([" not", "."], "ot", " n")]
)
def test_a_stop_string_is_found_within_a_token(tokens: list[str], stop: str, text: str) -> None:
    source, ids = script(tokens)
    deltas, reason = run(source, ids, stop=[stop])
    assert ("".join(deltas), reason) == (text, "stop")


# The stop string stayed in the answer, and could not be chosen to.
@pytest.mark.parametrize(("include", "text"), [(False, "1, 2, 3, 4, 5, 6, "), (True, "1, 2, 3, 4, 5, 6, 7")])
def test_a_stop_string_is_left_out_unless_asked_for(include: bool, text: str) -> None:
    source, ids = script([piece for number in range(1, 11) for piece in (str(number), ", ")])
    deltas, reason = run(source, ids, stop=["7"], include_stop=include)
    assert ("".join(deltas), reason) == (text, "stop")


# Characters that are spread over tokens became replacement marks, in the stream and in the final text.
@pytest.mark.parametrize("text", ["😀", "삼겹살", "ď", "a😀ď살"])
def test_only_whole_characters_are_streamed(text: str) -> None:
    source, ids = script([bytes([byte]) for byte in text.encode()])
    deltas, reason = run(source, [*ids, EOS], max_tokens=100)
    assert ("".join(deltas), reason) == (text, "eos")
    assert [delta for delta in deltas if delta] == list(text)


# The rest of a character that the length limit cut in two was lost, or shown as a mark for each byte.
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_character_that_stays_unfinished_is_one_mark_at_the_end(max_tokens: int) -> None:
    source, ids = script([bytes([byte]) for byte in "😀".encode()])
    deltas, reason = run(source, ids, max_tokens=max_tokens)
    assert (deltas, reason) == ([*[""] * (max_tokens - 1), "\ufffd"], "length")


# Decoded one by one, words ran together: a sentencepiece token loses its space where it comes first.
def test_words_keep_their_spaces_when_they_come_one_by_one() -> None:
    source = sentencepiece_like()
    hello, there, world = FIRST_WORD + 1, FIRST_WORD + 2, FIRST_WORD + 3
    assert source.decode([hello, there, world]) == "Hello there world"
    deltas, _ = run(source, [hello, there, world, EOS], prompt_token_ids=[BOS])
    assert deltas == ["Hello", " there", " world", ""]
    deltas, _ = run(source, [there, world, EOS], prompt_token_ids=[BOS, hello])
    assert deltas == [" there", " world", ""]


# Control tokens leaked into the text; and where the first token was one, the prompt's last was shown again.
@pytest.mark.parametrize(("skip", "deltas"), [(True, ["", "Hi", ""]), (False, ["<s>", "Hi", "</s>"])])
def test_control_tokens_are_hidden_unless_asked_for_and_the_prompt_is_not_repeated(
    skip: bool, deltas: list[str]
) -> None:
    source, (hi, prompt) = script(["Hi", "prompt"])
    found = run(source, [BOS, hi, EOS], prompt_token_ids=[prompt], skip_special_tokens=skip)
    assert found == (deltas, "eos")


# The prompt stood before the answer though nobody had asked for it.
def test_the_prompt_is_shown_on_request_alone() -> None:
    source, ids = script(["Hi", " there"])
    assert run(source, [ids[1], EOS], prompt_token_ids=[BOS, ids[0]]) == ([" there", ""], "eos")
    deltas, _ = run(source, [ids[1], EOS], prompt_token_ids=[BOS, ids[0]], echo=True)
    assert deltas == ["Hi there", ""]


# Of several end tokens one alone was known, and the answer ran on past the end of its turn.
def test_each_end_token_ends_the_text_and_on_the_last_place_it_is_the_reason() -> None:
    source, _ = script([f"t{number} " for number in range(10)])
    assert run(source, [3, 9, 4], eos=(5, 9)) == (["t1 ", ""], "eos")
    assert run(source, [3, 5, 4], eos=(5, 9)) == (["t1 ", ""], "eos")
    assert run(source, [3, 9], eos=(5, 9), max_tokens=2) == (["t1 ", ""], "eos")
    assert run(source, [3, 4, 9], eos=(5, 9), max_tokens=2) == (["t1 ", "t2 "], "length")
    assert run(source, [3, 7, 4], eos=(5, 9), stop_token_ids=[7]) == (["t1 ", ""], "stop")
    with_eos = run(source, [3, 9, 4], eos=(5, 9), ignore_eos=True, max_tokens=3)
    assert with_eos == (["t1 ", "t7 ", "t2 "], "length")


# A parameter under another server's name was taken and had no effect.
def test_a_parameter_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos_token"):
        GenerateRequest(prompt="a", ignore_eos_token=True)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match=r"sampling\.temprature"):
        GenerateRequest(prompt="a", sampling={"temprature": 1.0})  # type: ignore[arg-type]
    assert door(build_tokenizer())(prompt="a", ignore_eos=True).ignore_eos


# An empty prompt, or no token to generate, stopped the engine.
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": " \n\t"}),
        ("prompt_token_ids", {"prompt_token_ids": []}),
        ("messages", {"messages": []}),
        ("max_tokens", {"prompt": "a", "max_tokens": 0}),
    ],
)
def test_nothing_to_do_is_refused_at_the_door(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=field):
        GenerateRequest(**fields)
    source = build_tokenizer()  # which puts no token before a text
    assert Tokenizer(source).encode("") == []
    assert door(source)(prompt="a").prompt_token_ids == tuple(source.encode("a"))


# One request's fault was everybody's: a token id beyond the vocabulary stopped the engine.
@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"sampling": {"logit_bias": {191222: -100.0}}}, "sampling.logit_bias.0: token id 191222"),
        ({"stop_token_ids": [1024]}, "stop_token_ids.0: token id 1024"),
        ({"prompt": None, "prompt_token_ids": [3, 1024]}, "prompt_token_ids.1: token id 1024"),
        ({"sampling": {"bad_words": [" "]}}, "sampling.bad_words.0"),
        ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
    ],
)
def test_an_odd_request_is_refused_alone(fields: dict[str, Any], place: str) -> None:
    prepare = door(build_tokenizer())
    healthy = [{"prompt": f"value {number}"} for number in range(3)]
    taken = [prepare(**healthy[0])]
    with pytest.raises(InvalidRequest) as caught:
        prepare(**{"prompt": "odd", **fields})
    taken += [prepare(**request) for request in healthy[1:]]
    assert place in caught.value.message
    source = build_tokenizer()
    assert [source.decode(one.prompt_token_ids) for one in taken] == ["value 0", "value 1", "value 2"]


# What did not fit was refused with a wrong number, and nobody could ask for what does fit.
def test_an_answer_that_does_not_fit_is_refused_with_all_numbers_and_made_to_fit_on_request() -> None:
    prepare = door(build_tokenizer(), max_seq_len=2048)
    prompt = {"prompt_token_ids": [5] * 8}
    with pytest.raises(TooLong) as caught:
        prepare(**prompt, max_tokens=2041)
    assert all(number in caught.value.message for number in ("8 tokens", "2041", "2048"))
    error = caught.value
    assert (error.prompt_tokens, error.max_tokens, error.limit) == (8, 2041, 2048)
    assert prepare(**prompt, max_tokens=2040).max_tokens == 2040
    assert prepare(**prompt, max_tokens="fit").max_tokens == 2040


# The ends of the range of a parameter were refused.
def test_bounds_of_parameters_are_within_them() -> None:
    prepare = door(build_tokenizer())
    for top_p in (0.0, 1.0):
        sampling = prepare(prompt="a", sampling={"top_p": top_p, "temperature": 0.0}).sampling
        assert (sampling.top_p, sampling.temperature) == (top_p, 0.0)
