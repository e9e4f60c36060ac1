"""What OpenAI's completions and chats have in common, as fields of the fleet's requests. No HTTP here."""

from __future__ import annotations

from typing import Any

from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_common.schemas import GenerateRequest, Guide, Sampling
from streamfleet_producer.gateway.openai_schemas import GenerationBody, ResponseFormat

_OURS = {"sampling.": "", "truncate": "truncate_prompt_tokens", "prompt_token_ids": "prompt"}
"""How our fields are called there, where that differs."""


def generation_fields(body: GenerationBody, model: str | None) -> dict[str, Any]:
    """The fields of a `GenerateRequest` that both have; `model` is what the queue calls it.

    Raises:
        InvalidRequest: a token id of `logit_bias` is none.
    """
    stop = body.stop or ()
    return {
        "model": model,
        "sampling": _sampling(body),
        "stop": (stop,) if isinstance(stop, str) else stop,
        "include_stop": bool(body.include_stop_str_in_output),
        "stop_token_ids": body.stop_token_ids or (),
        "min_tokens": body.min_tokens or 0,
        "ignore_eos": bool(body.ignore_eos),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "truncate": body.truncate_prompt_tokens,
    }


def _sampling(body: GenerationBody) -> Sampling:
    bias = body.logit_bias or {}
    # OpenAI's defaults, which draw; ours would be greedy.
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=[(_token_id(token), added) for token, added in bias.items()],
        bad_words=body.bad_words or (),
        # Theirs may be negative.
        seed=None if body.seed is None else body.seed % 2**63,
    )


def _token_id(text: str) -> int:
    token_id = int(text)
    if token_id >= 2**31:
        raise invalid(f"logit_bias.{text}: no token has this id")
    return token_id


def guide(body: GenerationBody, response_format: ResponseFormat | None = None) -> Guide | None:
    """The form that the answer must have, whichever field says it; None if none does.

    Raises:
        InvalidRequest: several do, or it is not valid.
    """
    form = body.structured_outputs
    wishes: list[tuple[str, dict[str, Any]]] = [
        ("guided_json", {"json_schema": body.guided_json}),
        ("guided_regex", {"regex": body.guided_regex}),
        ("guided_choice", {"choice": body.guided_choice}),
        ("structured_outputs.json", {"json_schema": form and form.json_}),
        ("structured_outputs.regex", {"regex": form and form.regex}),
        ("structured_outputs.choice", {"choice": form and form.choice}),
    ]
    if response_format is not None:
        wishes.append(("response_format", {"json_schema": _schema(response_format)}))
    given = [(name, wish) for name, wish in wishes if None not in wish.values()]
    if not given:
        return None
    if len(given) > 1:
        raise invalid(f"{given[1][0]}: the answer has a form already, by {given[0][0]}: give one of them")
    ((name, wish),) = given
    try:
        return Guide(**wish)
    except InvalidRequest as error:
        raise invalid(*(f"{name}: {_told(problem)}" for problem in error.problems)) from None


def _schema(wanted: ResponseFormat) -> dict[str, Any] | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise invalid("response_format.json_schema: it is missing")
    return wanted.json_schema.schema_ or {}


def generate_request(fields: dict[str, Any]) -> GenerateRequest:
    """The request of these fields. Raises InvalidRequest, which calls them as OpenAI does."""
    try:
        return GenerateRequest(**fields)
    except InvalidRequest as error:
        raise invalid(*map(_renamed, error.problems)) from None


def _renamed(problem: str) -> str:
    for ours, theirs in _OURS.items():
        if problem.startswith(ours):
            return theirs + problem.removeprefix(ours)
    return problem


def _told(problem: str) -> str:
    return problem.partition(": ")[2] or problem


def invalid(*problems: str) -> InvalidRequest:
    """The error of a body with these problems, each of which begins with the name of a field and a colon."""
    return InvalidRequest(f"the request is not valid: {'; '.join(problems)}", problems=problems)


def unsupported(place: str, instead: str) -> Unsupported:
    """The error of a field whose wish cannot be fulfilled, and what to do instead."""
    fault = f"{place}: not supported: {instead}"
    return Unsupported(fault, feature=place, problems=[fault])
