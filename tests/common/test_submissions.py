"""What a request may cost, told without a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from streamfleet_common.schemas import ChatMessage, Envelope, GenerateRequest
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
