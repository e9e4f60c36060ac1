"""The door: what is refused and with which numbers, what is cut, and what an answer begins with."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamfleet_common import schemas
from streamfleet_common.errors import InvalidRequest, ModelNotFound, TooLong, Unsupported
from streamfleet_worker.engine.base import EngineInfo
from streamfleet_worker.engine.guide import Guide
from streamfleet_worker.engine.prepared import Prepared
from streamfleet_worker.engine.preparer import Preparer
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import build_tokenizer
from tiny_tokenizers import BOS, EOS, FIRST_BYTE, FIRST_WORD, sentencepiece_like, word_piece

HELLO, THERE, WORLD = FIRST_WORD + 1, FIRST_WORD + 2, FIRST_WORD + 3
EMOJI = [FIRST_BYTE + byte for byte in "😀".encode()]
CHAT = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


def door(source: Any, max_seq_len: int = 100, compile_guide: Any = None) -> Callable[..., Prepared]:
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
    preparer = Preparer(Tokenizer(source), info, compile_guide)
    request = schemas.GenerateRequest.model_validate
    return lambda **fields: preparer.prepare(request({"max_tokens": 1, **fields}))


@pytest.fixture(scope="module")
def prepare() -> Callable[..., Prepared]:
    return door(build_tokenizer())


# --- lengths


def test_prompt_and_answer_must_fit_and_all_three_numbers_are_told(prepare: Callable[..., Prepared]) -> None:
    assert prepare(prompt_token_ids=[5] * 60, max_tokens=40).max_tokens == 40
    with pytest.raises(TooLong) as caught:
        prepare(prompt_token_ids=[5] * 60, max_tokens=41)
    error = caught.value
    assert (error.prompt_tokens, error.max_tokens, error.limit) == (60, 41, 100)


def test_fit_takes_what_the_prompt_leaves(prepare: Callable[..., Prepared]) -> None:
    assert prepare(prompt_token_ids=[5] * 60, max_tokens="fit").max_tokens == 40
    assert prepare(prompt_token_ids=[5] * 99, max_tokens="fit").max_tokens == 1
    with pytest.raises(TooLong) as caught:
        prepare(prompt_token_ids=[5] * 100, max_tokens="fit")
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.limit) == (100, 1, 100)


def test_the_least_number_of_tokens_must_fit_too(prepare: Callable[..., Prepared]) -> None:
    assert prepare(prompt_token_ids=[5] * 60, max_tokens="fit", min_tokens=40).min_tokens == 40
    with pytest.raises(TooLong) as caught:
        prepare(prompt_token_ids=[5] * 60, max_tokens="fit", min_tokens=41)
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.limit) == (60, 41, 100)
    with pytest.raises(InvalidRequest, match=r"min_tokens \(5\) is above max_tokens \(4\)"):
        schemas.GenerateRequest(prompt="a", max_tokens=4, min_tokens=5)


# --- cuts


def test_a_prompt_is_cut_only_on_request_and_on_the_side_asked_for(prepare: Callable[..., Prepared]) -> None:
    ids = list(range(10, 20))
    whole = prepare(prompt_token_ids=ids, truncate=10)
    assert (whole.prompt_token_ids, whole.cut_tokens) == (tuple(ids), 0)
    left = prepare(prompt_token_ids=ids, truncate=3)
    assert (left.prompt_token_ids, left.cut_tokens) == ((17, 18, 19), 7)
    right = prepare(prompt_token_ids=ids, truncate=3, truncate_side="right")
    assert (right.prompt_token_ids, right.cut_tokens) == ((10, 11, 12), 7)


def test_a_cut_prompt_is_measured_after_the_cut(prepare: Callable[..., Prepared]) -> None:
    cut = prepare(prompt_token_ids=[5] * 300, truncate=90, max_tokens="fit")
    assert (len(cut.prompt_token_ids), cut.max_tokens, cut.cut_tokens) == (90, 10, 210)
    with pytest.raises(TooLong):
        prepare(prompt_token_ids=[5] * 300, truncate=90, max_tokens=11)


def test_a_prompt_cut_on_the_left_still_begins_as_a_text_does() -> None:
    prepare = door(sentencepiece_like(adds_bos=True))
    ids = prepare(prompt="!x!x!").prompt_token_ids
    assert ids[0] == BOS
    cut = prepare(prompt="!x!x!", truncate=3)
    assert cut.prompt_token_ids == (BOS, *ids[-2:])
    assert cut.cut_tokens == len(ids) - 3
    # Where only one token has room, it is one of the text.
    assert prepare(prompt="!x!x!", truncate=1).prompt_token_ids == ids[-1:]
    by_hand = prepare(prompt_token_ids=[BOS, HELLO, THERE, WORLD], truncate=2)
    assert by_hand.prompt_token_ids == (BOS, WORLD)
    right = prepare(prompt="!x!x!", truncate=3, truncate_side="right")
    assert right.prompt_token_ids == ids[:3]


def test_a_chat_cut_on_the_left_keeps_the_beginning_of_the_text_and_loses_its_oldest_turns() -> None:
    template = "<s>{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    messages = [{"role": "user", "content": "x" * 5}, {"role": "assistant", "content": "!"}]
    prepare = door(sentencepiece_like(chat_template=template))
    ids = prepare(messages=messages).prompt_token_ids
    assert (ids[0], ids.count(BOS), ids.count(EOS)) == (BOS, 1, 2)
    cut = prepare(messages=messages, truncate=4)
    assert (cut.prompt_token_ids, cut.cut_tokens) == ((BOS, *ids[-3:]), len(ids) - 4)


def test_a_chat_whose_turns_begin_alike_is_cut_like_any_text() -> None:
    messages = [{"role": "user", "content": "x" * 5}, {"role": "assistant", "content": "!"}]
    prepare = door(sentencepiece_like(chat_template=CHAT))
    ids = prepare(messages=messages).prompt_token_ids
    assert prepare(messages=messages, truncate=4).prompt_token_ids == ids[-4:]


# --- what is refused


def test_token_ids_must_be_in_the_vocabulary_and_every_place_is_told(
    prepare: Callable[..., Prepared],
) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_token_ids\.1: token id 1024 .* 1024") as caught:
        prepare(
            prompt_token_ids=[5, 1024, 2000],
            stop_token_ids=[4096],
            sampling={"logit_bias": [(3, 1.0), (191222, -100.0)]},
        )
    places = [problem.partition(":")[0] for problem in caught.value.problems]
    assert places == ["prompt_token_ids.1", "prompt_token_ids.2", "stop_token_ids.0", "sampling.logit_bias.1"]


def test_hostile_requests_get_a_short_answer(prepare: Callable[..., Prepared]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare(prompt_token_ids=[5000] * 30_000)
    assert len(caught.value.problems) == 10


def test_a_token_has_one_bias(prepare: Callable[..., Prepared]) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.logit_bias\.2: token id 3 has a number already"):
        prepare(prompt="a", sampling={"logit_bias": [(3, 1.0), (4, 1.0), (3, 2.0)]})
    assert prepare(prompt="a", sampling={"logit_bias": {3: 1.0, 4: 1.0}}).sampling.logit_bias


def test_another_model_is_not_served(prepare: Callable[..., Prepared]) -> None:
    with pytest.raises(ModelNotFound) as caught:
        prepare(prompt="a", model="another")
    assert caught.value.known == ["tiny"]
    assert prepare(prompt="a", model="tiny").prompt_token_ids


def test_a_prompt_that_the_tokenizer_makes_nothing_of_is_empty() -> None:
    source = word_piece()
    source.unk_token = "[UNK]"
    prepare = door(source)
    with pytest.raises(InvalidRequest, match="no tokens"):
        prepare(prompt="\u0000")
    assert prepare(prompt="hello").prompt_token_ids
    # Nor does a token that comes before every text make it one.
    with_bos = sentencepiece_like(adds_bos=True)
    with_bos.backend_tokenizer.normalizer = source.backend_tokenizer.normalizer
    with pytest.raises(InvalidRequest, match="no tokens"):
        door(with_bos)(prompt="\u0000")
    assert door(with_bos)(prompt_token_ids=[BOS]).prompt_token_ids == (BOS,)


# --- words


def test_bad_words_are_runs_of_tokens(prepare: Callable[..., Prepared]) -> None:
    source = build_tokenizer()
    runs = prepare(prompt="a", sampling={"bad_words": ["return", " return", "self"]}).bad_words
    assert {source.decode(run) for run in runs} == {"return", " return", "self", " self"}
    assert len(runs) == len(set(runs)) == 4


def test_bad_words_that_forbid_everything_or_nothing_are_refused(prepare: Callable[..., Prepared]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare(prompt="a", sampling={"bad_words": ["ok", " ", "\n\t"]})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "sampling.bad_words.1",
        "sampling.bad_words.2",
    ]
    source = word_piece()
    source.unk_token = "[UNK]"
    with pytest.raises(InvalidRequest, match=r"sampling\.bad_words\.0: this model has no tokens for it"):
        door(source)(prompt="hello", sampling={"bad_words": ["ж"]})


# --- forms


def test_a_guide_is_compiled_once_for_all_its_rows() -> None:
    asked = []

    class Compiled:
        def matcher(self) -> Any:
            raise AssertionError("only a row needs one")

    def compile_guide(guide: schemas.Guide, scope: str) -> Guide:
        asked.append(guide)
        return Compiled()

    prepare = door(build_tokenizer(), compile_guide=compile_guide)
    prepared = prepare(prompt="a", guide={"regex": "[0-9]+"}, n=3)
    assert isinstance(prepared.guide, Compiled)
    assert asked == [schemas.Guide(regex="[0-9]+")]
    assert prepare(prompt="a").guide is None
    assert len(asked) == 1


def test_a_guide_where_there_is_no_library_for_it_is_refused_with_the_way_to_it(
    prepare: Callable[..., Prepared],
) -> None:
    with pytest.raises(Unsupported, match="extra `guided`") as caught:
        prepare(prompt="a", guide={"choice": ["yes", "no"]})
    assert caught.value.feature == "guide"


# --- the prompt shown


def test_an_echo_is_the_prompt_as_the_tokenizer_decodes_it() -> None:
    source = sentencepiece_like(adds_bos=True)
    prepare = door(source)
    ids = [BOS, HELLO, THERE, *EMOJI]
    assert prepare(prompt_token_ids=ids).prefix == ""
    assert prepare(prompt_token_ids=ids, echo=True).prefix == "Hello there😀"
    shown = prepare(prompt_token_ids=ids, echo=True, skip_special_tokens=False)
    assert shown.prefix == source.decode(ids) == "<s> Hello there😀"
    # The answer may complete the character.
    assert prepare(prompt_token_ids=ids[:-1], echo=True).prefix == "Hello there"
    assert prepare(prompt_token_ids=ids, truncate=5, echo=True).prefix == "😀"


def test_everything_else_is_passed_on(prepare: Callable[..., Prepared]) -> None:
    prepared = prepare(
        prompt="a",
        n=3,
        max_tokens=7,
        min_tokens=2,
        stop=["x", "y"],
        include_stop=True,
        stop_token_ids=[7, 7, 9],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=2,
        prompt_logprobs=True,
        skip_special_tokens=False,
        sampling={"temperature": 0.5, "seed": 4},
    )
    assert (prepared.n, prepared.max_tokens, prepared.min_tokens) == (3, 7, 2)
    assert (prepared.stop, prepared.include_stop) == (("x", "y"), True)
    assert (prepared.stop_token_ids, prepared.ignore_eos) == (frozenset({7, 9}), True)
    assert (prepared.logprobs, prepared.top_logprobs, prepared.prompt_logprobs) == (True, 2, True)
    assert not prepared.skip_special_tokens
    assert (prepared.sampling.temperature, prepared.sampling.seed) == (0.5, 4)


def test_many_threads_at_once(prepare: Callable[..., Prepared]) -> None:
    def one(number: int) -> tuple[Any, Any, str]:
        text = f"value {number} <|im_end|> " + "x" * (number % 7)
        chat = prepare(messages=[{"role": "user", "content": text}], echo=True)
        return prepare(prompt=text).prompt_token_ids, chat.prompt_token_ids, chat.prefix

    expected = [one(number) for number in range(60)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(60))) == expected


# --- results


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 64, "max_tokens": 32_000},
        {"n": 4, "max_tokens": 4_096, "logprobs": True, "top_logprobs": 20},
        {"n": 60, "max_tokens": 1, "echo": True, "prompt": "ab " * 30_000},
        {"prompt_token_ids": [5] * 20_000, "logprobs": True, "top_logprobs": 20, "prompt_logprobs": True},
    ],
)
def test_what_no_result_could_hold_is_refused_before_it_is_computed(fields: dict[str, Any]) -> None:
    prepare = door(build_tokenizer(), max_seq_len=200_000)
    with pytest.raises(InvalidRequest, match="a result holds 4194304") as caught:
        prepare(**{"prompt_token_ids": [5] if "prompt" not in fields else None, **fields})
    assert caught.value.details["bytes"] > 4 * 1024 * 1024


def test_a_large_answer_that_fits_is_taken() -> None:
    prepare = door(build_tokenizer(), max_seq_len=200_000)
    assert prepare(prompt_token_ids=[5], n=64, max_tokens=4_096).n == 64
    assert prepare(prompt_token_ids=[5], max_tokens=8_192, logprobs=True, top_logprobs=20).top_logprobs == 20
