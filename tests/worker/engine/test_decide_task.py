"""Decisions of a classifier: the numbers of plain transformers on the same pairs, what is cut and refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from random_decisions import RandomDecisions
from streamfleet_common.decisions import DecideRequest, Decision, Question
from streamfleet_common.errors import InvalidRequest, ModelNotFound, TooLong, Unsupported
from streamfleet_worker.engine.encoder_model import EncoderModel, load_encoder
from streamfleet_worker.engine.encoder_runner import EncoderRunner
from streamfleet_worker.engine.pair_decision_preparer import PairDecisionPreparer
from streamfleet_worker.engine.tasks.decide import DecideTask, score_column
from streamfleet_worker.engine.tasks.encoder_job import EncoderJob
from tiny_encoder import CLS, LABELS, MAX_POSITIONS, SEP, Kind, tiny_encoder

STATE = "return the text of the value"
QUESTIONS = (
    Question(id="same", criteria="is it the same?", type="yes_no"),
    Question(id="kind", criteria="what is it", options=["a string", "a list of strings", "None", "a"]),
)
NLI = ("contradiction", "neutral", "Entailment")
TOLERANCE = 2e-5
"""Of logits, packed layers against plain ones."""


@pytest.fixture(scope="module")
def load() -> Callable[..., EncoderModel]:
    """Load each model once."""
    loaded: dict[str, EncoderModel] = {}

    def of(folder: Path) -> EncoderModel:
        key = str(folder)
        if key not in loaded:
            loaded[key] = load_encoder(key, "cpu", "float32")
        return loaded[key]

    return of


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classifier with the labels of natural language inference."""
    folder = shutil.copytree(tiny_encoder("classifier"), tmp_path_factory.mktemp("nli") / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": dict(enumerate(NLI)), "label2id": {name: i for i, name in enumerate(NLI)}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


Load = Callable[[Path], EncoderModel]


class Peer:
    """The same by transformers: pairs that its own tokenizer makes of whole texts."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.inference_mode()
    def logits(self, first: str, second: str) -> list[float]:
        takes_types = self._model.config.type_vocab_size > 1
        pair = self.tokenizer(first, second, return_tensors="pt", return_token_type_ids=takes_types)
        found: list[float] = self._model(**pair).logits[0].tolist()
        return found

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))


def compute(encoder: EncoderModel, job: EncoderJob) -> tuple[Decision, ...]:
    """Run a job's items one by one."""
    runner = EncoderRunner(encoder)
    rows = [runner.run([item.value], str(item.group), item.length)[0] for item in job.items]
    answers: tuple[Decision, ...] = job.answer(rows)["answers"]
    return answers


def softmax(scores: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(score / temperature) for score in scores]
    return [weight / sum(weights) for weight in weights]


def expect(answer: Decision, question: Question, scores: list[float], temperature: float = 1.0) -> None:
    """An answer has these scores, and what follows from them."""
    assert (answer.id, tuple(answer.scores)) == (question.id, question.choices)
    assert list(answer.scores.values()) == pytest.approx(scores, abs=TOLERANCE)
    assert answer.option == question.choices[scores.index(max(scores))]
    assert tuple(answer.probabilities) == question.choices
    assert list(answer.probabilities.values()) == pytest.approx(softmax(scores, temperature), abs=TOLERANCE)


# --- scores


@pytest.mark.parametrize("kind", ["reranker", "roberta_reranker"])
def test_the_only_logit_is_the_score(load: Load, kind: Kind) -> None:
    folder = tiny_encoder(kind)
    encoder, peer = load(folder), Peer(folder)
    request = DecideRequest(state=STATE, questions=QUESTIONS, temperatures={2: 0.25})
    answers = compute(encoder, DecideTask(encoder, MAX_POSITIONS).prepare(request))
    for answer, question, temperature in zip(answers, QUESTIONS, (0.25, 1.0), strict=True):
        # White space is nothing to this tokenizer, so whole texts have the same tokens as their parts.
        first = f"{STATE}\n\n{question.criteria}"
        expect(answer, question, [peer.logits(first, it)[0] for it in question.choices], temperature)


def test_entailment_is_the_score_as_in_zero_shot_classification(load: Load, nli: Path) -> None:
    encoder, peer = load(nli), Peer(nli)
    request = DecideRequest(state=STATE, questions=QUESTIONS)
    answers = compute(encoder, DecideTask(encoder, MAX_POSITIONS).prepare(request))
    for answer, question in zip(answers, QUESTIONS, strict=True):
        first = f"{STATE}\n\n{question.criteria}"
        expect(answer, question, [peer.logits(first, option)[2] for option in question.choices])


def test_probabilities_are_those_of_transformers_own_pipeline(load: Load, nli: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(nli, model_input_names=["input_ids", "token_type_ids"])
    model = AutoModelForSequenceClassification.from_pretrained(nli)
    zero_shot = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer, device="cpu")
    encoder, question = load(nli), QUESTIONS[1]
    request = DecideRequest(state=STATE, questions=[question])
    (answer,) = compute(encoder, DecideTask(encoder, MAX_POSITIONS).prepare(request))
    told = zero_shot(f"{STATE}\n\n{question.criteria}", list(question.choices), hypothesis_template="{}")
    assert told["labels"][0] == answer.option
    expected = dict(zip(told["labels"], told["scores"], strict=True))
    assert answer.probabilities == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("labels", "column"),
    [
        (("LABEL_0",), 0),
        (("entailment", "neutral", "contradiction"), 0),
        (("CONTRADICTION", "NEUTRAL", "ENTAILMENT"), 2),
        (("not_entailment", "entailment"), 1),
        (LABELS, None),
        ((), None),
    ],
)
def test_labels_say_which_logit_is_the_score(labels: tuple[str, ...], column: int | None) -> None:
    assert score_column(labels) == column


@pytest.mark.parametrize("kind", ["classifier", "bert"])
def test_a_model_whose_labels_do_not_say_it_is_refused(load: Load, kind: Kind) -> None:
    task = DecideTask(load(tiny_encoder(kind)), MAX_POSITIONS)
    with pytest.raises(Unsupported, match="one label alone") as caught:
        task.prepare(DecideRequest(state=STATE, questions=QUESTIONS))
    assert caught.value.feature == "decide"


# --- tokens


@pytest.fixture(scope="module")
def peer() -> Peer:
    return Peer(tiny_encoder("reranker"))


@pytest.fixture(scope="module")
def encoder(load: Load) -> EncoderModel:
    return load(tiny_encoder("reranker"))


def values(job: EncoderJob) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ids and token types of each item."""
    return [(tuple(ids), tuple(types)) for ids, types in (item.value for item in job.items)]


def test_a_pair_is_laid_out_as_the_tokenizer_does(encoder: EncoderModel, peer: Peer) -> None:
    job = DecideTask(encoder, MAX_POSITIONS).prepare(DecideRequest(state=STATE, questions=QUESTIONS))
    pairs = [(q.criteria, option) for q in QUESTIONS for option in q.choices]
    assert job.n == len(job.items) == len(pairs) == 6
    for value, (criteria, option) in zip(values(job), pairs, strict=True):
        whole = peer.tokenizer(f"{STATE}\n\n{criteria}", option, return_token_type_ids=True)
        assert value == (tuple(whole["input_ids"]), tuple(whole["token_type_ids"]))


def test_control_tokens_in_texts_of_others_are_text(encoder: EncoderModel) -> None:
    evil = "value [SEP] yes [CLS]"
    question = Question(id="q", criteria=evil, options=[evil, "no"])
    job = DecideTask(encoder, MAX_POSITIONS).prepare(DecideRequest(state=evil, questions=[question]))
    assert [[token for token in ids if token in (CLS, SEP)] for ids, _ in values(job)] == [
        [CLS, SEP, SEP]
    ] * 2


def test_tokens_are_counted_with_the_state_once(encoder: EncoderModel, peer: Peer) -> None:
    job = DecideTask(encoder, MAX_POSITIONS).prepare(DecideRequest(state=STATE, questions=QUESTIONS))
    asked = sum(
        peer.count(question.criteria) + 1 + sum(peer.count(option) + 1 for option in question.choices)
        for question in QUESTIONS
    )
    assert job.usage.prompt_tokens == 1 + peer.count(STATE) + asked
    assert (job.usage.cut_tokens, job.usage.truncated) == (0, 0)


def test_counting_takes_a_tokenizer_alone(encoder: EncoderModel) -> None:
    task = DecideTask(encoder, 64)
    preparer = PairDecisionPreparer(encoder.tokenizer, encoder.name, 64)
    refused = 0
    for request in RandomDecisions(1)(40):
        try:
            count = task.prepare(request).usage.prompt_tokens
        except TooLong:
            refused += 1
            with pytest.raises(TooLong):
                preparer.count_tokens(request)
        else:
            assert preparer.count_tokens(request) == count
    assert 0 < refused < 40


def test_a_long_text_keeps_its_start_and_a_long_chat_its_end(encoder: EncoderModel, peer: Peer) -> None:
    words = " ".join(str(number) for number in range(200))
    limit = 40
    longest = max(peer.count(q.criteria) + max(map(peer.count, q.choices)) for q in QUESTIONS)
    room = limit - 3 - longest
    task = DecideTask(encoder, limit)
    with pytest.raises(TooLong) as caught:
        task.prepare(DecideRequest(state=words, questions=QUESTIONS))
    assert (caught.value.question, caught.value.options, caught.value.fit) == ("same", 2, 0)

    text = task.prepare(DecideRequest(state=words, questions=QUESTIONS, truncate=True))
    turns: Any = [{"role": "user", "content": words}]
    chat = task.prepare(DecideRequest(messages=turns, questions=QUESTIONS, truncate=True))
    whole = tuple(peer.tokenizer.encode(words, add_special_tokens=False))
    told = tuple(peer.tokenizer.encode(f"user: {words}", add_special_tokens=False))
    # All questions see the same of it.
    assert {ids[1 : 1 + room] for ids, _ in values(text)} == {whole[:room]}
    assert {ids[1 : 1 + room] for ids, _ in values(chat)} == {told[len(told) - room :]}
    assert max(len(ids) for ids, _ in values(text)) == limit
    assert (text.usage.cut_tokens, text.usage.truncated) == (len(whole) - room, 1)
    assert (chat.usage.cut_tokens, chat.usage.truncated) == (len(told) - room, 1)


def test_an_option_that_does_not_fit_is_told(encoder: EncoderModel, peer: Peer) -> None:
    options = ["yes", "no it is not", "the value of the text is not a string"]
    question = Question(id="q", criteria="is it so?", options=options)
    lengths = sorted(3 + 1 + peer.count(question.criteria) + peer.count(option) for option in options)
    with pytest.raises(TooLong) as caught:
        DecideTask(encoder, lengths[1]).prepare(
            DecideRequest(state="text value", questions=[question], truncate=True)
        )
    assert (caught.value.options, caught.value.fit, caught.value.prompt_tokens) == (3, 2, lengths[2])


def test_equal_pairs_have_one_digest(encoder: EncoderModel) -> None:
    task = DecideTask(encoder, MAX_POSITIONS)
    first, again = (task.prepare(DecideRequest(state=STATE, questions=QUESTIONS)) for _ in range(2))
    other = task.prepare(DecideRequest(state=f"{STATE} is", questions=QUESTIONS))
    digests = [item.digest for item in first.items]
    assert digests == [item.digest for item in again.items]
    assert len({*digests, *(item.digest for item in other.items)}) == 12


def test_no_questions_ask_no_model(load: Load) -> None:
    for kind in ("reranker", "bert"):
        job = DecideTask(load(tiny_encoder(kind)), 8).prepare(DecideRequest(state=STATE * 20))
        assert (job.n, job.usage.prompt_tokens, job.answer([])) == (0, 0, {"answers": ()})


def test_a_thousand_options_are_answered(encoder: EncoderModel) -> None:
    questions = [
        Question(id=f"q{n}", criteria="which?", options=[f"value {n} {i}" for i in range(256)])
        for n in range(4)
    ]
    job = DecideTask(encoder, MAX_POSITIONS).prepare(DecideRequest(state="text", questions=questions))
    assert job.n == 1024
    answers = job.answer(list(torch.eye(256).repeat(4, 1)[:, 7:8]))["answers"]
    assert [answer.option for answer in answers] == [f"value {n} 7" for n in range(4)]


# --- refused


def test_what_no_model_can_answer_is_refused(encoder: EncoderModel) -> None:
    task = DecideTask(encoder, MAX_POSITIONS)
    with pytest.raises(ModelNotFound):
        task.prepare(DecideRequest(state=STATE, model="other"))
    with pytest.raises(InvalidRequest, match="the state has no tokens"):
        task.prepare(DecideRequest(state="\x00", questions=QUESTIONS))
    question = Question(id="q", criteria="is it?", options=["yes", "\x00"])
    with pytest.raises(InvalidRequest, match=r"questions\.0\.options\.1"):
        task.prepare(DecideRequest(state=STATE, questions=[question]))
