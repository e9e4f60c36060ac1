"""The fleet's answers in OpenAI's words. No HTTP here: jobs without a gateway use it, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.schemas import Choice, End, FinishReason, Prefill
from streamfleet_producer.gateway.forced_call import call_id
from streamfleet_producer.gateway.openai_chat_request import ChatWish
from streamfleet_producer.gateway.openai_completion_request import CompletionWish
from streamfleet_producer.gateway.openai_logprobs import (
    CompletionLogprobs,
    Names,
    chat_logprobs,
    joined,
    unnamed,
)
from streamfleet_producer.gateway.tool_calls import Call, Content, ToolCallParser
from streamfleet_producer.shown import Line

FINISHED: Mapping[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length"}
"""Their words for ours; a request that ended in any other way is an error."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request."""

    id: str
    """`<queue>:<rid>`"""
    end: End
    lines: Mapping[int, Line] = field(default_factory=dict)
    """The tokens of each choice with their texts, where they were read one by one."""
    prefill: Prefill | None = None

    def line(self, choice: Choice) -> Line:
        """The tokens of a choice; without texts where nobody read these."""
        found = self.lines.get(choice.index)
        if found is not None:
            return found
        ids, logprobs, top = choice.token_ids, choice.logprobs, choice.top_logprobs
        return Line(list(ids), [""] * len(ids), list(logprobs), list(top))


def completion_answer(
    wish: CompletionWish, outcomes: Sequence[Outcome], *, model: str, created: int, names: Names = unnamed
) -> dict[str, Any]:
    """The answer to a completion: one outcome for each of its requests.

    `created` is a Unix time in seconds.
    """
    choices = []
    for place, outcome in enumerate(outcomes):
        for rank, choice in enumerate(_best(outcome.end.choices, wish.n)):
            text, logprobs = choice.text, None
            if wish.logprobs is not None:
                told = CompletionLogprobs(names)
                parts: list[dict[str, Any]] = []
                if wish.echoes:
                    prompt, parts = echoed(wish, place, outcome.prefill or outcome.end.prefill, told)
                    text = prompt + text
                line = outcome.line(choice)
                parts.append(told.add(line.ids, line.texts, line.logprobs, line.top_logprobs))
                logprobs = joined(parts)
            choices.append(
                {
                    "index": place * wish.n + rank,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": FINISHED[choice.finish_reason],
                }
            )
    return {
        "id": f"cmpl-{outcomes[0].id}",
        "object": "text_completion",
        "created": created,
        "model": model,
        "system_fingerprint": outcomes[0].end.revision or None,
        "choices": choices,
        "usage": usage(outcome.end for outcome in outcomes),
    }


def echoed(
    wish: CompletionWish, place: int, prefill: Prefill | None, told: CompletionLogprobs
) -> tuple[str, list[dict[str, Any]]]:
    """The text that stands for the prompt before an answer, and its tokens."""
    given = wish.prompts[place]
    if prefill is None:
        told.skip(given or "")
        return given or "", []
    text = "".join(prefill.texts) if given is None else given
    at, texts = 0, []
    for token in prefill.texts:
        # What a tokenizer puts before a text is a token, and not in the text.
        is_shown = text.startswith(token, at)
        texts.append(token if is_shown else "")
        at += len(token) if is_shown else 0
    part = told.add(prefill.token_ids, texts, prefill.logprobs, prefill.top_logprobs)
    part["tokens"] = list(prefill.texts)
    told.skip(text[at:])
    return text, [part]


def chat_answer(
    wish: ChatWish, outcome: Outcome, *, model: str, created: int, names: Names = unnamed
) -> dict[str, Any]:
    """The answer to a chat; `created` is a Unix time in seconds."""
    choices = []
    for choice in outcome.end.choices:
        content, calls = _called(wish, outcome.id, choice)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        line = outcome.line(choice)
        logprobs = None
        if wish.logprobs:
            told = chat_logprobs(line.ids, line.texts, line.logprobs, line.top_logprobs, names)
            logprobs = {"content": told, "refusal": None}
        choices.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": "tool_calls" if calls else FINISHED[choice.finish_reason],
            }
        )
    return {
        "id": f"chatcmpl-{outcome.id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "system_fingerprint": outcome.end.revision or None,
        "choices": choices,
        "usage": usage([outcome.end]),
    }


def usage(ends: Iterable[End]) -> dict[str, Any]:
    """The tokens read and written for all these together."""
    prompt = completion = cached = 0
    for end in ends:
        prompt += end.usage.prompt_tokens
        completion += end.usage.completion_tokens
        cached += end.usage.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def tool_call(id: str, index: int, place: int, call: Call) -> dict[str, Any]:  # noqa: A002 (theirs)
    """A call as it is told; `place` is its own among those of the choice `index`."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(id, index, place), "type": "function", "function": function}


def _called(wish: ChatWish, id: str, choice: Choice) -> tuple[str | None, list[dict[str, Any]]]:  # noqa: A002
    if not wish.tools:
        return choice.text, []
    parser = ToolCallParser(wish.tools)
    content = ""
    calls: list[dict[str, Any]] = []
    for part in [*parser.feed(choice.text), *parser.close()]:
        if isinstance(part, Content):
            content += part.text
        elif not (calls and wish.one_call):
            calls.append(tool_call(id, choice.index, len(calls), part))
    return (content or None) if calls else content, calls


def _best(choices: Sequence[Choice], n: int) -> Sequence[Choice]:
    """Those of the highest mean log-probability, the best first; all in order if there are no more."""
    return choices if len(choices) <= n else sorted(choices, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(choice: Choice) -> float:
    known = [logprob for logprob in choice.logprobs if logprob is not None]
    return sum(known) / len(known) if known else float("-inf")
