"""OpenAI's completions as requests of the fleet. No HTTP here: jobs without a gateway use it, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer.gateway.openai_generation import generate_request, generation_fields, guide, invalid
from streamfleet_producer.gateway.openai_schemas import CompletionBody

MAX_TOKENS = 16
"""Of a completion that does not say it, as OpenAI has it."""
MAX_ANSWERS = 1024
"""To all prompts of one request together."""


@dataclass(frozen=True, slots=True)
class CompletionWish:
    """What a completion asks of the fleet, and how its answers are to be told."""

    requests: list[GenerateRequest]
    """One for each prompt."""
    prompts: list[str | None]
    """Their texts, where they are texts that the answers begin with; see `echoes`."""
    n: int
    """Answers to be told of each prompt, those of the highest mean log-probability if more are made."""
    logprobs: int | None
    """None tells none; else so many of the likeliest tokens at each place."""
    echoes: bool
    """The prompt's tokens are to be told, and its text is to be put before the answer's."""


def completion(body: CompletionBody, model: str | None) -> CompletionWish:
    """The requests of a completion; `model` is what the queue calls it.

    Raises:
        Unsupported: it has a suffix.
        InvalidRequest: it is not valid.
    """
    if body.suffix:
        raise Unsupported(
            "suffix: text cannot be put in between here: leave it out, or write a prompt that shows both",
            feature="suffix",
            problems=["suffix: not supported"],
        )
    n = body.n or 1
    made = body.best_of or n
    if made < n:
        raise invalid(f"best_of: it ({made}) is below n ({n})")
    if body.stream and made > n:
        raise invalid(
            "best_of: which answers are best is known at their end: set stream to false, or raise n"
        )
    prompts = _prompts(body.prompt)
    if len(prompts) * made > MAX_ANSWERS:
        raise invalid(
            f"prompt: {len(prompts)} prompts with {made} answers each are over {MAX_ANSWERS}: send several"
        )
    shows_prompt = bool(body.echo) and body.logprobs is not None
    fields = {
        **generation_fields(body, model),
        "guide": guide(body),
        "max_tokens": MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        "n": made,
        "logprobs": body.logprobs is not None or made > n,
        "top_logprobs": body.logprobs or 0,
        # With log-probabilities the prompt comes token by token, and its text is put first here.
        "prompt_logprobs": shows_prompt,
        "echo": bool(body.echo) and not shows_prompt,
    }
    requests = []
    for place, prompt in enumerate(prompts):
        given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        try:
            requests.append(generate_request(given | fields))
        except InvalidRequest as error:
            raise _placed(error, place, len(prompts)) from None
    uncut = body.truncate_prompt_tokens is None
    texts = [prompt if uncut and isinstance(prompt, str) else None for prompt in prompts]
    return CompletionWish(requests, texts, n, body.logprobs, shows_prompt)


def _prompts(given: Any) -> list[str | list[int]]:
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


def _placed(error: InvalidRequest, place: int, count: int) -> InvalidRequest:
    if count == 1:
        return error
    return invalid(
        *(
            problem.replace("prompt", f"prompt.{place}", 1) if problem.startswith("prompt") else problem
            for problem in error.problems
        )
    )
