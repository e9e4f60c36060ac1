"""What OpenAI's completions and chats have in common, as fields of the fleet's requests. No HTTP here."""

from __future__ import annotations

from typing import Any

from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_common.schemas import GenerateRequest, Guide, Sampling
from streamfleet_producer.gateway.openai_schemas import GenerationBody, ResponseFormat

_OURS = {"sampling.": "", "truncate": "truncate_prompt_tokens", "prompt_token_ids": "prompt"}
"""How our fields are called there, where that differs."""
_OURS_BY_THEIRS = {
    "stop": "stop",
    "include_stop_str_in_output": "include_stop",
    "stop_token_ids": "stop_token_ids",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "truncate_prompt_tokens": "truncate",
}
_DRAWN = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
}
_FORMS = {"guided_json", "guided_regex", "guided_choice", "structured_outputs", "response_format"}


def generation_fields(body: GenerationBody, model: str | None) -> dict[str, Any]:
    """The fields of a `GenerateRequest` that both have; `model` is what the queue calls it.

    Raises:
        InvalidRequest: a token id of `logit_bias` is none.
    """
    # Most bodies say little, and what is not said costs nothing.
    said = body.model_fields_set
    fields: dict[str, Any] = {"model": model, "sampling": _sampling(body)}
    for name in said & _OURS_BY_THEIRS.keys():
        value = getattr(body, name)
        if value is not None:
            fields[_OURS_BY_THEIRS[name]] = (value,) if isinstance(value, str) else value
    return fields


def _sampling(body: GenerationBody) -> Sampling:
    said = body.model_fields_set
    wish: dict[str, Any] = {name: getattr(body, name) for name in said & _DRAWN}
    wish = {name: value for name, value in wish.items() if value is not None}
    # OpenAI's defaults, which draw; ours would be greedy.
    wish.setdefault("temperature", 1.0)
    if wish.get("top_k") == -1:
        wish["top_k"] = 0
    if body.logit_bias is not None:
        wish["logit_bias"] = [(_token_id(token), added) for token, added in body.logit_bias.items()]
    if body.seed is not None:
        wish["seed"] = body.seed % 2**63  # theirs may be negative
    return Sampling(**wish)


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
    given = _forms(body, response_format)
    if not given:
        return None
    if len(given) > 1:
        raise invalid(f"{given[1][0]}: the answer has a form already, by {given[0][0]}: give one of them")
    ((name, wish),) = given
    try:
        return Guide(**wish)
    except InvalidRequest as error:
        raise invalid(*(f"{name}: {_told(problem)}" for problem in error.problems)) from None


def form_name(body: GenerationBody, response_format: ResponseFormat | None = None) -> str:
    """The field that says which form the answer must have; "" if none does."""
    given = _forms(body, response_format)
    name = given[0][0] if given else ""
    return "response_format.json_schema.schema" if name == "response_format" else name


def _forms(body: GenerationBody, response_format: ResponseFormat | None) -> list[tuple[str, dict[str, Any]]]:
    """The fields that say a form, each as one of a `Guide`."""
    if body.model_fields_set.isdisjoint(_FORMS):
        return []
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
    return [(name, wish) for name, wish in wishes if None not in wish.values()]


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
