"""Rows of tokens: laid out and cut as transformers does it, with user text kept apart from control tokens."""

from typing import Any

import pytest
from tokenizers import processors

from streamfleet_common.errors import InvalidRequest, TooLong
from streamfleet_worker.engine.encoder_input import EncoderInput, InputBuilder
from streamfleet_worker.engine.token_cache import TokenCache
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_encoder import CLS, SEP, build_tokenizer

TEXT = "def encode(self, value): return ''.join(sorted(value)) # as the standard library does it"
OTHER = "class JSONDecoder: pass"


@pytest.fixture(scope="module", params=["bert", "roberta"])
def source(request: pytest.FixtureRequest) -> Any:
    """The tokenizer of transformers: one separator between two texts and two types, or two and one."""
    return build_tokenizer() if request.param == "bert" else roberta_like()


def roberta_like() -> Any:
    source = build_tokenizer()
    source.backend_tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return source


def builder(source: Any, limit: int = 512) -> InputBuilder:
    tokenizer = Tokenizer(source)
    return InputBuilder(tokenizer, TokenCache(tokenizer.encode_piece), limit)


def laid_out(row: EncoderInput) -> tuple[list[int], list[int]]:
    return row.ids.tolist(), row.types.tolist()


def theirs(source: Any, *texts: str, **options: Any) -> tuple[list[int], list[int]]:
    found = source(*texts, return_token_type_ids=True, **options)
    return found["input_ids"], found["token_type_ids"]


def pair(inputs: InputBuilder, first: str, second: str, **options: Any) -> EncoderInput:
    ids = inputs.tokens("texts.0", first), inputs.tokens("pairs.0", second)
    return inputs.pair(0, "texts.0", *ids, **{"side": None, "whose": "longer", **options})


def test_rows_are_laid_out_as_transformers_does_it(source: Any) -> None:
    inputs = builder(source)
    assert laid_out(inputs.text(0, "texts.0", TEXT, None)) == theirs(source, TEXT)
    assert laid_out(pair(inputs, TEXT, OTHER)) == theirs(source, TEXT, OTHER)


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_and_pairs_are_cut_as_transformers_does_it(source: Any, side: Any) -> None:
    """A pair: token by token off the longer text; of rerank's only off the second."""
    length = len(theirs(source, TEXT)[0])
    source.truncation_side = side
    for limit in range(7, 2 * length + 4):
        inputs = builder(source, limit)
        row = inputs.text(0, "texts.0", TEXT, side)
        assert laid_out(row) == theirs(source, TEXT, truncation=True, max_length=limit)
        assert row.cut_tokens == max(0, length - limit)
        for texts in ((TEXT, OTHER), (OTHER, TEXT), (TEXT, TEXT)):
            whole = len(theirs(source, *texts)[0])
            row = pair(inputs, *texts, side=side)
            assert laid_out(row) == theirs(source, *texts, truncation="longest_first", max_length=limit)
            assert row.cut_tokens == max(0, whole - limit)
        whole = len(theirs(source, OTHER, TEXT)[0])
        room = limit - whole + len(inputs.tokens("", TEXT))
        if room > 0:
            row = pair(inputs, OTHER, TEXT, side=side, whose="second")
            assert laid_out(row) == theirs(source, OTHER, TEXT, truncation="only_second", max_length=limit)
            assert row.cut_tokens == max(0, whole - limit)
        else:
            with pytest.raises(TooLong):
                pair(inputs, OTHER, TEXT, side=side, whose="second")


def test_user_text_has_no_control_tokens() -> None:
    inputs = builder(build_tokenizer())
    ids = inputs.text(0, "texts.0", "[CLS] a [SEP] b", None).ids.tolist()
    assert (ids.count(CLS), ids.count(SEP)) == (1, 1)
    ids = pair(inputs, "a [SEP] b", "[SEP]").ids.tolist()
    assert (ids.count(CLS), ids.count(SEP)) == (1, 2)


def test_what_is_too_long_is_refused_by_name_with_its_tokens_and_the_limit() -> None:
    source = build_tokenizer()
    inputs = builder(source, 12)
    tokens = len(theirs(source, TEXT)[0])
    words = rf"texts\.5 has {tokens} tokens, over the limit of 12: .*truncate"
    with pytest.raises(TooLong, match=words) as found:
        inputs.text(5, "texts.5", TEXT, None)
    assert (found.value.prompt_tokens, found.value.limit, found.value.item) == (tokens, 12, 5)
    tokens = len(theirs(source, OTHER, TEXT)[0])
    with pytest.raises(TooLong, match=f"has {tokens} tokens, over the limit of 12"):
        pair(inputs, OTHER, TEXT)


def test_a_query_must_leave_room_for_one_token() -> None:
    inputs = builder(build_tokenizer(), 12)
    one = inputs.tokens("query", "the")
    assert len(one) == 1
    inputs.check_query(one * 8)  # and three control tokens, and one of a document
    with pytest.raises(TooLong, match=r"12 tokens with what is around it.*shorten the query") as found:
        inputs.check_query(one * 9)
    assert (found.value.prompt_tokens, found.value.limit) == (13, 12)


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"documents\.3 has no tokens"):
        builder(build_tokenizer()).tokens("documents.3", "\x00\u200d")


def test_rows_are_equal_if_ids_and_types_are() -> None:
    def digest(ids: list[int], types: list[int] | None = None) -> bytes | None:
        return EncoderInput.of(ids, types).spec("mean").digest

    assert digest([1, 2, 3]) == digest([1, 2, 3], [0, 0, 0])
    different = [digest([1, 2, 3]), digest([1, 2]), digest([1, 3, 2]), digest([1, 2, 3], [0, 0, 1])]
    assert len({*different}) == 4
    spec = EncoderInput.of([1, 2, 3]).spec("mean")
    assert (spec.length, spec.group) == (3, "mean")
    assert spec.bytes > 3 * 5
