"""Tokens counted on the producer's side: the worker's own numbers and refusals, for any tokenizer."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

import tiny_encoder
import tiny_model
import tiny_tokenizers
from random_decisions import WORDS, RandomDecisions
from streamfleet_common.cards import Card, Limits
from streamfleet_common.decisions import DecideRequest, Question
from streamfleet_common.errors import InvalidRequest, StreamfleetError, TokenizerFailed, TooLong, Unsupported
from streamfleet_common.one_shot import CallRequest, ClassifyRequest, EmbedRequest, RerankRequest
from streamfleet_common.schemas import ChatMessage, GenerateRequest, Request
from streamfleet_common.token_layout import TokenLayout
from streamfleet_producer.token_counter import TokenCounter
from streamfleet_worker.engine.decision_preparer import DecisionPreparer
from streamfleet_worker.engine.encoder_model import load_encoder
from streamfleet_worker.engine.pair_decision_preparer import PairDecisionPreparer
from streamfleet_worker.engine.tasks.encoder_task import EncoderTask
from streamfleet_worker.engine.tokenizer import Tokenizer

CHAT = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}Answer:"


def paired(source: Any, first: str = "<s> $A </s>", pair: str = "<s> $A </s> </s> $B:1 </s>:1") -> Any:
    """The tokenizer with control tokens around texts."""
    tokens = [("<s>", tiny_tokenizers.BOS), ("</s>", tiny_tokenizers.EOS)]
    source.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=first, pair=pair, special_tokens=tokens
    )
    return source


def without_template(source: Any) -> Any:
    source.chat_template = None
    return source


SOURCES: dict[str, Callable[[], Any]] = {
    "byte-level": lambda: without_template(tiny_model.build_tokenizer()),
    "byte-level, chat": tiny_model.build_tokenizer,
    "sentencepiece": lambda: tiny_tokenizers.sentencepiece_like(adds_bos=True),
    "sentencepiece, chat": lambda: tiny_tokenizers.sentencepiece_like(chat_template=CHAT),
    "unigram, pairs": lambda: paired(tiny_tokenizers.unigram()),
    "wordpiece": tiny_encoder.build_tokenizer,
    "wordpiece, bare": tiny_tokenizers.word_piece,
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Any:
    return SOURCES[request.param]()


@pytest.fixture
def counter(source: Any, tmp_path: Path) -> TokenCounter:
    source.save_pretrained(tmp_path)
    return TokenCounter.from_file(tmp_path)


def card(layout: TokenLayout | None, max_seq_len: int = 64) -> Card:
    limits = Limits(max_batch_size=8, max_seq_len=max_seq_len, max_queue_depth=8, max_request_bytes=1 << 20)
    return Card(worker="w", queue="q", model="tiny", limits=limits, layout=layout)


def outcome(count: Callable[..., int], *values: Any) -> tuple[Any, ...]:
    """The number, or everything that an error tells."""
    try:
        return int, count(*values)
    except StreamfleetError as error:
        return type(error), str(error), error.details


@pytest.mark.parametrize("preparer", [DecisionPreparer, PairDecisionPreparer])
def test_questions_are_counted_and_refused_as_the_worker_does(
    source: Any, counter: TokenCounter, preparer: Any
) -> None:
    chance = random.Random(5)
    seen = set()
    for request in RandomDecisions(3)(60):
        asked = request.model_copy(update={"truncate": chance.random() < 0.5})
        limit = chance.choice((20, 50, 150, 1000))
        worker = preparer(Tokenizer(source), "tiny", limit)
        told = outcome(worker.count_tokens, asked)
        assert outcome(counter.count, asked, card(worker.layout, limit)) == told
        seen.add(told[0])
    assert seen >= {int, TooLong}


def test_layouts_travel_on_cards() -> None:
    shown = card(TokenLayout(text=1, pair=2, state=3, question=4, option=5, option_prefix=" "))
    assert Card.model_validate(shown.model_dump()) == shown


# --- by hand

LAYOUT = TokenLayout(text=2, pair=3, state=1, question=1, option=1)
HELLO = "hello world"  # two tokens


@pytest.fixture
def words() -> TokenCounter:
    return TokenCounter(tiny_tokenizers.word_piece().backend_tokenizer)


@pytest.mark.parametrize(
    ("request_", "count"),
    [
        (GenerateRequest(prompt=HELLO, max_tokens=1), 4),
        (GenerateRequest(prompt=HELLO, max_tokens=1, truncate=3), 3),
        (GenerateRequest(prompt_token_ids=[1, 2, 3], max_tokens=1), 3),
        (EmbedRequest(texts=["hello", HELLO]), 3 + 4),
        (ClassifyRequest(texts=["hello"]), 3),
        (ClassifyRequest(texts=["hello", HELLO], pairs=[HELLO, HELLO]), (3 + 3) + (4 + 3)),
        (RerankRequest(query=HELLO, documents=["hello", HELLO]), (3 + 3) + (4 + 3)),
        (DecideRequest(state=HELLO), 0),
    ],
)
def test_every_kind_has_its_control_tokens(words: TokenCounter, request_: Request, count: int) -> None:
    assert words.count(request_, card(LAYOUT)) == count


def test_a_decide_requests_state_counts_once(words: TokenCounter) -> None:
    questions = [
        Question(id="a", criteria="do not", options=["hello", HELLO]),
        Question(id="b", criteria="world", options=["hello"]),
    ]
    request = DecideRequest(state=f"{HELLO}.", questions=questions)
    state, first, second = 1 + 3, (2 + 1) + (1 + 1) + (2 + 1), (1 + 1) + (1 + 1)
    assert words.count(request, card(LAYOUT)) == state + first + second


def test_what_does_not_fit_is_refused_unless_it_may_be_cut(words: TokenCounter) -> None:
    five = card(LAYOUT, 5)
    long = "hello hello hello hello"
    makes: list[Callable[[bool], Request]] = [
        lambda cut: EmbedRequest(texts=["hello", long], truncate=cut),
        lambda cut: ClassifyRequest(texts=["hello", long], truncate=cut),
        lambda cut: ClassifyRequest(texts=["hello", long], pairs=["hello", "hello"], truncate=cut),
        lambda cut: RerankRequest(query="hello", documents=["hello", long], truncate=cut),
    ]
    for make, first in zip(makes, (3, 3, 5, 5), strict=True):
        with pytest.raises(TooLong) as caught:
            words.count(make(False), five)
        assert ".1" in str(caught.value)
        assert caught.value.item == 1
        assert long not in str(caught.value)
        assert caught.value.limit == 5
        assert words.count(make(True), five) == first + 5
    with pytest.raises(TooLong):  # a query is never cut
        words.count(RerankRequest(query=HELLO, documents=["hello"], truncate=True), five)
    with pytest.raises(TooLong) as caught:
        words.count(GenerateRequest(prompt=HELLO, max_tokens=2), five)
    assert (caught.value.prompt_tokens, caught.value.max_tokens) == (4, 2)
    assert words.count(GenerateRequest(prompt=HELLO, max_tokens="fit"), five) == 4


def test_a_control_tokens_spelling_is_text() -> None:
    source = tiny_tokenizers.word_piece().backend_tokenizer
    assert len(source.encode("</s>", add_special_tokens=False).ids) == 1  # taken for control
    assert TokenCounter(source).count(EmbedRequest(texts=["</s>"]), card(TokenLayout())) == len("</s>")


# --- what cannot be counted


def test_what_only_a_worker_can_count_is_unsupported(words: TokenCounter) -> None:
    chat = GenerateRequest(messages=[ChatMessage(role="user", content="hello")])
    for request in (chat, CallRequest(handler="tiny", input="hello")):
        with pytest.raises(Unsupported) as caught:
            words.count(request, card(LAYOUT))
        assert caught.value.feature == "count_tokens"
    with pytest.raises(Unsupported, match="does not say what its worker puts around a text"):
        words.count(EmbedRequest(texts=["hello"]), card(None))


def test_texts_without_tokens_are_refused() -> None:
    words = TokenCounter(tiny_tokenizers.word_piece().backend_tokenizer)
    for request, name in (
        (EmbedRequest(texts=["hello", "\x00"]), r"texts\.1"),
        (RerankRequest(query="\x00", documents=["hello"]), "query"),
        (GenerateRequest(prompt="\x00"), "the prompt"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{name} has no tokens"):
            words.count(request, card(LAYOUT))


def test_files_that_are_no_tokenizer_are_told(tmp_path: Path) -> None:
    with pytest.raises(TokenizerFailed, match=r"no file: name the tokenizer\.json"):
        TokenCounter.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerFailed, match="cannot be read"):
        TokenCounter.from_file(tmp_path / "tokenizer.json")


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Unsupported, match=r"streamfleet\[tokenizers\]"):
        TokenCounter.from_file(tmp_path)


# --- beside the worker's encoders


class RandomTexts:
    """Requests to an encoder told by a seed."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)

    def __call__(self, kind: str) -> Request:
        source = self._source
        count = source.randint(1, 3)
        cut: dict[str, Any] = {
            "truncate": source.random() < 0.5,
            "truncate_side": source.choice(("left", "right")),
        }
        if kind == "embed":
            return EmbedRequest(texts=self._texts(count), **cut)
        if kind == "rerank":
            return RerankRequest(query=self._texts(1)[0], documents=self._texts(count), **cut)
        pairs = self._texts(count) if source.random() < 0.5 else []
        return ClassifyRequest(texts=self._texts(count), pairs=pairs, **cut)

    def _texts(self, count: int) -> list[str]:
        source = self._source
        return [" ".join(source.choices(WORDS, k=source.randint(1, 12))) for _ in range(count)]


def prompt_tokens(task: EncoderTask, request: Request) -> int:
    return task.prepare(request).usage.prompt_tokens


@pytest.mark.parametrize(
    ("model", "kind"),
    [("bert", "embed"), ("roberta", "embed"), ("classifier", "classify"), ("reranker", "rerank")],
)
def test_texts_are_counted_and_refused_as_the_worker_does(model: tiny_encoder.Kind, kind: str) -> None:
    folder = tiny_encoder.tiny_encoder(model)
    encoder, counter = load_encoder(str(folder), "cpu"), TokenCounter.from_file(folder)
    make, seen = RandomTexts(2), set()
    for limit in (4, 6, 16, 24, 64) * 12:
        task = EncoderTask(encoder, max_seq_len=limit)
        request = make(kind)
        told = outcome(prompt_tokens, task, request)
        assert outcome(counter.count, request, card(task.layout, limit)) == told
        seen.add(told[0])
    assert seen == {int, TooLong}
