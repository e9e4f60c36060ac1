"""Embed, classify and rerank: the numbers of plain transformers, what is cut, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from encoder_driver import answer, encoder, needs_minilm
from streamfleet_common import codec
from streamfleet_common.decisions import DecideRequest, Question
from streamfleet_common.errors import InvalidRequest, ModelNotFound, TooLong, Unsupported
from streamfleet_common.one_shot import MAX_ITEMS, ClassifyRequest, Embedding, EmbedRequest, RerankRequest
from streamfleet_common.schemas import End, GenerateRequest
from streamfleet_worker.engine import minilm
from streamfleet_worker.engine.encoder_model import load_encoder
from streamfleet_worker.engine.tasks.encoder_task import EncoderTask
from tiny_encoder import LABELS, MAX_POSITIONS, Kind, tiny_encoder

TEXTS = (
    "def sorted(iterable, /, *, key=None, reverse=False)",
    "A heap is a binary tree.",
    "The Zen of Python: beautiful is better than ugly, explicit is better than implicit.",
)
QUERY = "what is a heap"


class Reference:
    """Plain transformers: one text at a time, nothing filled up."""

    def __init__(self, folder: str, *, head: bool) -> None:
        kind: Any = AutoModelForSequenceClassification if head else AutoModel
        self._model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def _output(self, *texts: str) -> Any:
        return self._model(**self._tokenizer(*texts, return_tensors="pt"))

    def hidden(self, text: str) -> torch.Tensor:
        hidden: torch.Tensor = self._output(text).last_hidden_state[0]
        return hidden

    def logits(self, *texts: str) -> list[float]:
        found: list[float] = self._output(*texts).logits[0].tolist()
        return found


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


def vectors(embeddings: tuple[Embedding, ...]) -> torch.Tensor:
    return torch.tensor([one.vector.tolist() for one in embeddings])


def hand_softmax(logits: list[float]) -> list[float]:
    exact = torch.tensor(logits, dtype=torch.float64).exp()
    return [float(part / exact.sum()) for part in exact]


def hand_sigmoid(logit: float) -> float:
    return float(1 / (1 + torch.tensor(-logit, dtype=torch.float64).exp()))


# --- embed


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert", "sentence"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_vectors_are_those_of_plain_transformers(kind: Kind, pooling: Any) -> None:
    reference = Reference(str(tiny_encoder(kind)), head=False)
    request = EmbedRequest(texts=TEXTS, pooling=pooling, normalize=False)
    found = vectors(answer(encoder(kind), request)["embeddings"])
    for row, text in zip(found, TEXTS, strict=True):
        hidden = reference.hidden(text)
        expected = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[pooling]
        check_close(row, expected)


@needs_minilm
def test_minilm_gives_the_vectors_that_its_card_says() -> None:
    """The mean of all tokens, brought to length one; like texts lie close."""
    folder = str(minilm.folder(lambda _: None))
    reference = Reference(folder, head=False)
    texts = ("A cat sleeps.", "A kitten takes a nap.", "The stock market fell sharply on Tuesday.")
    found = vectors(answer(encoder(minilm.ALIAS), EmbedRequest(texts=texts))["embeddings"])
    for row, text in zip(found, texts, strict=True):
        mean = reference.hidden(text).mean(0)
        check_close(row, mean / mean.norm())
    assert found[0] @ found[1] > 0.6
    assert found[0] @ found[2] < 0.2


def test_the_model_says_how_vectors_are_made_unless_the_request_does() -> None:
    loaded = encoder("sentence")  # the first token's, not normalised
    plain = vectors(answer(loaded, EmbedRequest(texts=TEXTS))["embeddings"])
    same = vectors(answer(loaded, EmbedRequest(texts=TEXTS, pooling="cls", normalize=False))["embeddings"])
    assert torch.equal(plain, same)
    scaled = vectors(answer(loaded, EmbedRequest(texts=TEXTS, normalize=True))["embeddings"])
    torch.testing.assert_close(scaled, plain / plain.norm(dim=1, keepdim=True))
    assert encoder("bert").normalize
    assert vectors(answer(encoder("bert"), EmbedRequest(texts=TEXTS))["embeddings"]).norm(
        dim=1
    ).tolist() == pytest.approx([1.0] * 3, abs=1e-6)


def test_vectors_are_cut_before_they_are_normalised() -> None:
    whole = vectors(answer(encoder("bert"), EmbedRequest(texts=TEXTS, normalize=False))["embeddings"])
    cut = vectors(answer(encoder("bert"), EmbedRequest(texts=TEXTS, dimensions=5))["embeddings"])
    kept = whole[:, :5]
    torch.testing.assert_close(cut, kept / kept.norm(dim=1, keepdim=True))
    with pytest.raises(InvalidRequest, match=r"65 were asked for, .* have 64"):
        answer(encoder("bert"), EmbedRequest(texts=TEXTS, dimensions=65))


# --- classify


@pytest.mark.parametrize("kind", ["classifier", "tagger", "decoder_classifier"])
def test_labels_have_the_probabilities_of_plain_transformers(kind: Kind) -> None:
    loaded = encoder(kind)
    reference = Reference(str(tiny_encoder(kind)), head=True)
    for multi_label in (None, True, False):
        request = ClassifyRequest(texts=TEXTS, multi_label=multi_label)
        found = answer(loaded, request)["classifications"]
        for one, text in zip(found, TEXTS, strict=True):
            logits = reference.logits(text)
            each_by_itself = kind == "tagger" if multi_label is None else multi_label
            scores = [hand_sigmoid(x) for x in logits] if each_by_itself else hand_softmax(logits)
            told = {label.label: label.score for label in one.labels}
            assert told == pytest.approx(dict(zip(LABELS, scores, strict=True)), rel=1e-4)
            assert [label.score for label in one.labels] == sorted(told.values(), reverse=True)
            assert one.label == max(told, key=lambda name: told[name])


def test_pairs_are_read_together() -> None:
    reference = Reference(str(tiny_encoder("classifier")), head=True)
    pairs = TEXTS[::-1]
    found = answer(encoder("classifier"), ClassifyRequest(texts=TEXTS, pairs=pairs))["classifications"]
    for one, first, second in zip(found, TEXTS, pairs, strict=True):
        scores = hand_softmax(reference.logits(first, second))
        told = {label.label: label.score for label in one.labels}
        assert told == pytest.approx(dict(zip(LABELS, scores, strict=True)), rel=1e-4)


def test_the_likeliest_labels_are_told_if_only_some_are() -> None:
    every = answer(encoder("classifier"), ClassifyRequest(texts=TEXTS))["classifications"]
    some = answer(encoder("classifier"), ClassifyRequest(texts=TEXTS, top_k=2))["classifications"]
    more = answer(encoder("classifier"), ClassifyRequest(texts=TEXTS, top_k=9))["classifications"]
    assert [one.labels for one in some] == [one.labels[:2] for one in every]
    assert more == every


def test_equals_stand_in_the_models_order_and_those_that_round_alike_by_their_logits() -> None:
    job = EncoderTask(encoder("classifier")).prepare(ClassifyRequest(texts=TEXTS[:1], multi_label=True))
    [equal] = job.answer([torch.tensor([1.0, 2.0, 1.0])])["classifications"]
    assert [label.label for label in equal.labels] == ["good", "bad", "odd"]
    [close] = job.answer([torch.tensor([60.0, 80.0, 70.0])])["classifications"]
    assert [(label.label, label.score) for label in close.labels] == [
        ("good", 1.0),
        ("odd", 1.0),
        ("bad", 1.0),
    ]


# --- rerank


def test_a_model_is_told_which_text_a_token_belongs_to_if_its_tokenizer_says_so(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_encoder("reranker"), tmp_path / "model")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    names = ["input_ids", "attention_mask"]
    assert config["model_input_names"] != names
    file.write_text(json.dumps({**config, "model_input_names": names}))
    logits = [
        Reference(str(path), head=True).logits(QUERY, "a heap")[0]
        for path in (folder, tiny_encoder("reranker"))
    ]
    assert abs(logits[0] - logits[1]) > 1e-4
    loaded = load_encoder(str(folder), "cpu", "float32")
    request = RerankRequest(query=QUERY, documents=("a heap",), raw_scores=True)
    assert answer(loaded, request)["ranking"][0].score == pytest.approx(logits[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["reranker", "roberta_reranker"])
def test_documents_are_ranked_by_the_scores_of_plain_transformers(kind: Kind) -> None:
    reference = Reference(str(tiny_encoder(kind)), head=True)
    logits = [reference.logits(QUERY, text)[0] for text in TEXTS]
    order = sorted(range(3), key=lambda place: -logits[place])
    found = answer(encoder(kind), RerankRequest(query=QUERY, documents=TEXTS))["ranking"]
    assert [rank.index for rank in found] == order
    assert [rank.score for rank in found] == pytest.approx([hand_sigmoid(logits[i]) for i in order], rel=1e-4)
    raw = answer(encoder(kind), RerankRequest(query=QUERY, documents=TEXTS, raw_scores=True, top_n=2))
    assert [rank.index for rank in raw["ranking"]] == order[:2]
    assert [rank.score for rank in raw["ranking"]] == pytest.approx([logits[i] for i in order[:2]], rel=1e-4)


def test_of_equal_documents_the_first_stands_first_and_saturated_ones_by_their_logits() -> None:
    request = RerankRequest(query=QUERY, documents=("a", "b", "c", "d"))
    job = EncoderTask(encoder("reranker")).prepare(request)
    logits = [torch.tensor([number]) for number in (60.0, -1.0, 90.0, 60.0)]
    ranking = job.answer(logits)["ranking"]
    assert [rank.index for rank in ranking] == [2, 0, 3, 1]
    assert [rank.score for rank in ranking[:3]] == [1.0, 1.0, 1.0]


# --- tokens


def test_tokens_are_counted_and_what_was_cut() -> None:
    long = "heap " * 200
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder("bert"))
    counts = [len(tokenizer(text)["input_ids"]) for text in (*TEXTS, long)]
    request = EmbedRequest(texts=(*TEXTS, long), truncate=True)
    usage = answer(encoder("bert"), request)["usage"]
    cut = counts[-1] - MAX_POSITIONS
    assert (usage.prompt_tokens, usage.cut_tokens, usage.truncated) == (sum(counts) - cut, cut, 1)
    usage = answer(encoder("bert"), request, max_seq_len=10)["usage"]
    over = [count - 10 for count in counts if count > 10]
    assert (usage.cut_tokens, usage.truncated) == (sum(over), len(over))


def test_a_cut_text_is_the_text_of_its_start_or_its_end() -> None:
    text = " ".join(["heap", "tree", "sort", "list"] * 40)
    limit = 18
    words = text.split()
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder("bert"))
    each = {word: len(tokenizer(word)["input_ids"]) - 2 for word in set(words)}

    def embedded(text: str, **fields: Any) -> list[bytes]:
        request = EmbedRequest(texts=(text,), **fields)
        return [one.data for one in answer(encoder("bert"), request, max_seq_len=limit)["embeddings"]]

    for side, kept in (("right", words), ("left", words[::-1])):
        # As many words as have room; the next is left out as a whole, or the test would say nothing.
        count, taken = 0, 0
        while taken + each[kept[count]] <= limit - 2:
            taken += each[kept[count]]
            count += 1
        if taken < limit - 2:
            continue
        short = " ".join(kept[:count] if side == "right" else kept[:count][::-1])
        assert embedded(text, truncate=True, truncate_side=side) == embedded(short)
        break
    else:
        pytest.fail("no side ends with a word")


def test_what_is_too_long_is_refused_unless_it_may_be_cut() -> None:
    long = "heap " * 200
    with pytest.raises(
        TooLong, match=rf"texts\.1 has \d+ tokens, over the limit of {MAX_POSITIONS}"
    ) as found:
        answer(encoder("bert"), EmbedRequest(texts=("a", long)))
    assert found.value.item == 1
    with pytest.raises(TooLong, match=r"the pair of texts\.0 and pairs\.0 has"):
        answer(encoder("classifier"), ClassifyRequest(texts=("a",), pairs=(long,)))
    with pytest.raises(TooLong, match=r"documents\.1, with the query, has"):
        answer(encoder("reranker"), RerankRequest(query="a", documents=("b", long)))
    with pytest.raises(TooLong, match="the query takes"):
        answer(encoder("reranker"), RerankRequest(query=long, documents=("b",), truncate=True))
    cut = answer(encoder("reranker"), RerankRequest(query="a", documents=("b", long), truncate=True))
    assert cut["usage"].truncated == 1


def test_texts_are_looked_for_in_the_cache() -> None:
    task = EncoderTask(encoder("reranker"), token_cache_bytes=1 << 20)
    first = task.prepare(RerankRequest(query=QUERY, documents=TEXTS))
    again = task.prepare(RerankRequest(query=QUERY, documents=TEXTS[:2]))
    assert task.counts == {"tokenization_cache_queries": 7, "tokenization_cache_hits": 3}
    assert [item.digest for item in again.items] == [item.digest for item in first.items[:2]]


# --- refusals


@pytest.mark.parametrize(
    ("kind", "request_", "feature", "words"),
    [
        ("classifier", EmbedRequest(texts=("a",)), "embed", "gives labels, not vectors"),
        ("bert", ClassifyRequest(texts=("a",)), "classify", "gives vectors and has no labels"),
        ("reranker", ClassifyRequest(texts=("a",)), "classify", "one label only"),
        (
            "bert",
            RerankRequest(query="a", documents=("b",)),
            "rerank",
            "gives vectors, and not the one score",
        ),
        ("classifier", RerankRequest(query="a", documents=("b",)), "rerank", "gives 3 labels, and not"),
        ("bert", GenerateRequest(prompt="a"), "generate", "does embed, not generate"),
        (
            "classifier",
            DecideRequest(state="a", questions=(Question(id="b", criteria="c", type="yes_no"),)),
            "decide",
            "bad, good, odd",
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_name(
    kind: Kind, request_: Any, feature: str, words: str
) -> None:
    with pytest.raises(Unsupported, match=words) as found:
        EncoderTask(encoder(kind)).prepare(request_)
    assert found.value.feature == feature


def test_a_task_says_what_it_does() -> None:
    kinds: tuple[Kind, ...] = ("bert", "classifier", "reranker")
    assert [EncoderTask(encoder(kind)).tasks for kind in kinds] == [
        ("embed",),
        ("classify",),
        ("rerank", "decide"),
    ]
    assert EncoderTask(encoder("bert"), max_seq_len=10_000).max_seq_len == MAX_POSITIONS
    assert EncoderTask(encoder("bert"), max_seq_len=20).max_seq_len == 20


def test_another_model_is_refused() -> None:
    with pytest.raises(ModelNotFound, match="not 'other'"):
        EncoderTask(encoder("bert")).prepare(EmbedRequest(texts=("a",), model="other"))


def test_an_answer_that_no_result_holds_is_refused_at_the_door() -> None:
    """What is let through does fit, and is not much smaller than what is refused."""
    wide = replace(encoder("bert"), model=SimpleNamespace(config=SimpleNamespace(hidden_size=4096)))
    task = EncoderTask(wide)
    texts = ("a",) * MAX_ITEMS
    with pytest.raises(InvalidRequest, match="fewer dimensions"):
        task.prepare(EmbedRequest(texts=texts))
    fit = max(n for n in range(900, 1100) if fits(task, texts, n))
    vector = Embedding(data=bytes(4 * fit))
    size = len(codec.encode(End(state="done", embeddings=(vector,) * MAX_ITEMS)))
    assert 0.99 * codec.MAX_RESULT_BYTES < size <= codec.MAX_RESULT_BYTES


def fits(task: EncoderTask, texts: tuple[str, ...], dimensions: int) -> bool:
    try:
        task.prepare(EmbedRequest(texts=texts, dimensions=dimensions))
    except InvalidRequest:
        return False
    return True
