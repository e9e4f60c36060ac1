"""What a request may cost, told without a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from streamfleet_common import codec
from streamfleet_common.one_shot import CallRequest, ClassifyRequest, EmbedRequest, RerankRequest
from streamfleet_common.schemas import ChatMessage, Envelope, GenerateRequest, Request
from streamfleet_common.submissions import Submission


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "a", "max_tokens": 1}, 2),
        ({"prompt": "abcd", "max_tokens": 10}, 11),
        ({"prompt": "abcde", "max_tokens": 10}, 12),
        ({"prompt": "a" * 4000}, 1000 + 128),
        ({"prompt_token_ids": range(1, 8), "max_tokens": 3}, 10),
        ({"prompt_token_ids": [5], "max_tokens": 32_768}, 32_769),
        ({"prompt": "abcd", "max_tokens": 10, "n": 4}, 41),
        ({"prompt_token_ids": [5] * 9, "truncate": 4, "max_tokens": 3}, 7),
        ({"prompt_token_ids": [5] * 3, "truncate": 4, "max_tokens": 3}, 6),
        ({"prompt": "abcd", "max_tokens": "fit"}, 1),
    ],
)
def test_prompt_and_answer(fields: dict[str, Any], tokens: int) -> None:
    fields = (
        {**fields, "prompt_token_ids": tuple(fields["prompt_token_ids"])}
        if "prompt_token_ids" in fields
        else fields
    )
    assert Submission.of(Envelope(request=GenerateRequest(**fields))).tokens == tokens


def test_a_chat_is_the_text_of_its_turns() -> None:
    turns = (ChatMessage(role="system", content="abcd"), ChatMessage(role="user", content="abcde"))
    request = GenerateRequest(messages=turns, max_tokens=2)
    # 9 characters are 3 tokens.
    assert Submission.of(Envelope(request=request)).tokens == 5


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (EmbedRequest(texts=["a"]), 1),
        (EmbedRequest(texts=["a" * 30, "b" * 11]), 11),
        # Characters, not bytes.
        (EmbedRequest(texts=["\U0001f40d" * 8]), 2),
        (ClassifyRequest(texts=["a" * 8]), 2),
        (ClassifyRequest(texts=["a" * 8, "b" * 4], pairs=["c" * 3, "d" * 2]), 5),
        # The query is read with each document: 3 x 10 + 6 + 1 + 3.
        (RerankRequest(query="q" * 10, documents=["a" * 6, "b", "c" * 3]), 10),
    ],
)
def test_one_shot_work_is_the_texts_that_are_read(request_: Request, tokens: int) -> None:
    assert Submission.of(Envelope(request=request_)).tokens == tokens


def test_a_handler_s_input_is_what_it_takes_on_the_wire() -> None:
    small = Submission.of(Envelope(request=CallRequest(handler="h", input=1)))
    large = Submission.of(Envelope(request=CallRequest(handler="h", input={"a": ["b" * 4000]})))
    # 1 byte opens the map, 2 are its name, 1 opens the list, 3 the text; in the other a number has 1.
    assert large.tokens - small.tokens in (1001, 1002)
    assert small.tokens == -(-len(codec.encode(small.envelope)) // 4)
