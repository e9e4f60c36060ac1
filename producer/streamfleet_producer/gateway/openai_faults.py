"""How OpenAI's bodies call what the fleet names in an error. No HTTP here."""

from __future__ import annotations

import re
from typing import Any

from streamfleet_producer.gateway.openai_generation import form_name
from streamfleet_producer.gateway.openai_schemas import ChatBody, CompletionBody, EmbeddingBody
from streamfleet_producer.gateway.their_names import Rename

_GUIDE = re.compile(r"^guide(?:\.(?:json_schema|regex|choice))?(?=[^\w.])")
_BIAS = re.compile(r"^sampling\.logit_bias\.\d+(?=: token id (\d+))")
_PROMPT_TOKEN = re.compile(r"^prompt_token_ids(?=\.(\d+): token id (\d+))")
_NAME = re.compile(r"^(?:sampling\.)?(\w+)(?=[.:])")
_TEXT = re.compile(r"^texts(\.\d+)?(?=\W)")


def completion_names(body: CompletionBody) -> Rename:
    """The names of a completion."""
    own = {"top_logprobs": "logprobs", "prompt_logprobs": "echo"}

    def rename(problem: str) -> str:
        problem = _PROMPT_TOKEN.sub(lambda found: _prompt(body.prompt, int(found[1]), int(found[2])), problem)
        return _renamed(problem, own, form_name(body))

    return rename


def chat_names(body: ChatBody) -> Rename:
    """The names of a chat."""
    own = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}

    def rename(problem: str) -> str:
        # What has a form and was given none must call a tool.
        return _renamed(problem, own, form_name(body, body.response_format) or "tools")

    return rename


def embedding_names(body: EmbeddingBody) -> Rename:
    """The names of a request for embeddings."""

    def rename(problem: str) -> str:
        return _TEXT.sub(
            "input" if isinstance(body.input, str) else lambda found: f"input{found[1] or ''}", problem
        )

    return rename


def _renamed(problem: str, own: dict[str, str], form: str) -> str:
    problem = _GUIDE.sub(form, problem)
    # Theirs is a map of tokens, ours a list of pairs.
    problem = _BIAS.sub(lambda found: f"logit_bias.{found[1]}", problem)
    names = {"prompt_token_ids": "prompt", "truncate": "truncate_prompt_tokens", **own}
    return _NAME.sub(lambda found: names.get(found[1], found[1]), problem)


def _prompt(prompts: Any, place: int, token_id: int) -> str:
    """The name of the first prompt that has this token there."""
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, list) and prompt[place : place + 1] == [token_id]:
            return f"prompt.{number}"
    return "prompt"
