"""Questions from a client through Redis to a model, and their answers back."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoTokenizer

from reference_model import reference
from streamfleet_common.schemas import Request
from streamfleet_producer import ChatMessage, Client, DecideRequest, GenerateRequest, Question, TooLong
from tiny_model import tiny_model

STATE = "The text is a list of strings, and the value of the text is None. " * 3
QUESTIONS = [
    Question(id="none", criteria="Is the value None?", type="yes_no"),
    Question(id="what", criteria="What is the text?", options=["a string", "a list", "None"]),
]


def expected(state: str, question: Question) -> dict[str, float]:
    """Log-likelihoods by transformers, of pieces put together by hand."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    pieces = [
        "<|im_start|>user\n",
        state,
        f"\n\n{question.criteria}",
        "<|im_end|>\n<|im_start|>assistant\n",
    ]
    before = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    scores = {}
    for option in question.choices:
        ids = tokenizer.encode(option, add_special_tokens=False)
        logprobs = torch.log_softmax(reference("llama").logits(before + ids), dim=-1)
        scores[option] = sum(float(logprobs[len(before) - 1 + i, token]) for i, token in enumerate(ids))
    return scores


async def test_answers_come_back_in_order_with_their_probabilities(fleet: Client) -> None:
    end = await fleet.run(DecideRequest(state=STATE, questions=QUESTIONS), timeout=60)
    assert [answer.id for answer in end.answers] == ["none", "what"]
    for answer, question in zip(end.answers, QUESTIONS, strict=True):
        scores = expected(STATE, question)
        assert answer.scores == pytest.approx(scores, abs=2e-4)
        assert answer.option == max(scores, key=scores.__getitem__)
        assert sum(answer.probabilities.values()) == pytest.approx(1.0)
    assert (end.state, end.choices, end.model) == ("done", (), str(tiny_model()))
    assert end.usage.prompt_tokens > 60
    assert end.usage.completion_tokens == 0


async def test_decisions_and_generations_share_workers_and_none_changes(fleet: Client) -> None:
    decide = DecideRequest(state=STATE, questions=QUESTIONS)
    generate = GenerateRequest(prompt="def value(self):", max_tokens=16)
    alone, text = await asyncio.gather(fleet.run(decide), fleet.run(generate))
    ends = await fleet.run_many([decide, generate] * 10, timeout=60)
    assert [end.answers for end in ends[::2]] == [alone.answers] * 10
    assert [end.text for end in ends[1::2]] == [text.text] * 10
    assert alone.exact


async def test_a_decision_can_be_asked_for_later_and_watched(fleet: Client) -> None:
    messages = [ChatMessage(role="user", content="is it?"), ChatMessage(role="assistant", content="it is")]
    request = DecideRequest(messages=messages, questions=QUESTIONS)
    ticket = await fleet.submit(request, stream=True)
    end = await fleet.result(ticket.id, timeout=60)
    assert end.answers[0].scores == pytest.approx(
        expected("user: is it?\nassistant: it is", QUESTIONS[0]), abs=2e-4
    )
    async with fleet.attach(ticket.id) as events:
        async for _ in events:
            pass
    assert events.result == end


async def test_no_questions_have_no_answers(fleet: Client) -> None:
    end = await fleet.run(DecideRequest(state=STATE), timeout=60)
    assert (end.state, end.answers, end.usage.prompt_tokens) == ("done", (), 0)


async def test_what_does_not_fit_is_told_by_its_question(fleet: Client) -> None:
    # The workers take 256 tokens.
    long = Question(id="long", criteria="the text of the value " * 60, type="yes_no")
    with pytest.raises(TooLong) as caught:
        await fleet.run(DecideRequest(state="s", questions=[*QUESTIONS, long], truncate=True), timeout=60)
    assert (caught.value.question, caught.value.options, caught.value.fit) == ("long", 2, 0)
    end = await fleet.run(DecideRequest(state=STATE * 10, questions=QUESTIONS, truncate=True), timeout=60)
    assert end.usage.cut_tokens > 100
    assert end.usage.truncated == 1
    assert len(end.answers) == 2


async def test_a_producer_counts_as_the_worker_does(fleet_url: str) -> None:
    requests: list[Request] = [
        DecideRequest(state=STATE, questions=QUESTIONS),
        DecideRequest(state=STATE * 10, questions=QUESTIONS, truncate=True),
        GenerateRequest(prompt=STATE, max_tokens=1),
        GenerateRequest(prompt=STATE, max_tokens=1, truncate=9),
    ]
    async with Client(fleet_url, queue="tiny", tokenizer=tiny_model()) as fleet:
        counts = [await fleet.count_tokens(request) for request in requests]
        ends = await fleet.run_many(requests, timeout=60)
        assert [end.usage.prompt_tokens for end in ends] == counts
        assert [end.usage.truncated for end in ends] == [0, 1, 0, 1]
        with pytest.raises(TooLong):
            await fleet.count_tokens(DecideRequest(state=STATE * 10, questions=QUESTIONS))
