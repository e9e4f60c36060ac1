"""TGI's request as one of ours."""

from __future__ import annotations

import re
from typing import Any

from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_common.schemas import GenerateRequest, Guide, Sampling
from streamfleet_producer.gateway.tgi_schemas import (
    DEFAULT_MAX_NEW_TOKENS,
    TgiGenerateBody,
    TgiJsonSchemaGrammar,
    TgiParameters,
    TgiRegexGrammar,
)
from streamfleet_producer.gateway.their_names import Rename, head_of

NOTHING_SAID = TgiParameters()
_THEIRS = {
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "n": "parameters.best_of",
    "truncate": "parameters.truncate",
    "stop": "parameters.stop",
    "top_logprobs": "parameters.top_n_tokens",
    "sampling": "parameters",
    "guide": "parameters.grammar.value",
}
"""How the fields of ours are called there."""
_FORM = re.compile(r"^guide\.(?:json_schema|regex)(?=[^\w.])")


def parameters_of(body: TgiGenerateBody) -> TgiParameters:
    """What it says of how to generate."""
    return NOTHING_SAID if body.parameters is None else body.parameters


def tgi_names(body: TgiGenerateBody) -> Rename:
    """The names that it has for what the fleet finds wrong."""
    has_schema = isinstance(parameters_of(body).grammar, TgiJsonSchemaGrammar)
    form = "parameters.grammar.value.schema" if has_schema else "parameters.grammar.value"

    def rename(problem: str) -> str:
        problem = _FORM.sub(form, problem)
        name = head_of(problem)
        return _THEIRS[name] + problem.removeprefix(name) if name in _THEIRS else problem

    return rename


def is_drawn(parameters: TgiParameters) -> bool:
    """Whether tokens are drawn; else the likeliest one is always taken."""
    cuts = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.typical_p)
    return parameters.do_sample or any(value is not None for value in cuts)


def request_of(
    body: TgiGenerateBody, *, model: str | None = None, stream: bool = False, max_seq_len: int | None = None
) -> GenerateRequest:
    """The request that a worker gets.

    Args:
        body: what the client sent.
        model: what the request asks for; None leaves it to the queue.
        stream: it is to be answered token by token.
        max_seq_len: what the most generous worker holds, in tokens, if that is known.

    Raises:
        InvalidRequest: parameters that do not go together, or nothing to continue.
        Unsupported: a watermark or an adapter.
    """
    parameters = parameters_of(body)
    _check(body, parameters, stream, max_seq_len)
    stop = parameters.stop or ()
    best_of = parameters.best_of or 1
    top = parameters.top_n_tokens or 0
    told = stream or parameters.details or parameters.decoder_input_details
    return GenerateRequest(
        model=model,
        prompt=body.inputs,
        max_tokens=parameters.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        n=best_of,
        truncate=parameters.truncate,
        sampling=_sampling(parameters),
        guide=_guide(parameters),
        stop=stop,
        include_stop=bool(stop),  # TGI leaves it in the text
        logprobs=told or best_of > 1,
        top_logprobs=top if told else 0,
        prompt_logprobs=parameters.decoder_input_details,
    )


def _check(body: TgiGenerateBody, parameters: TgiParameters, stream: bool, max_seq_len: int | None) -> None:
    best_of, truncate = parameters.best_of or 1, parameters.truncate
    faults = []
    if not body.inputs:
        faults.append("`inputs` is empty: there is nothing to continue")
    if best_of > 1 and not is_drawn(parameters):
        faults.append("`best_of` above 1 needs sampling, or all answers are the same: set `do_sample`")
    if best_of > 1 and parameters.seed is not None:
        faults.append("`best_of` above 1 excludes `seed`: each answer draws with one of its own")
    if stream and best_of > 1:
        faults.append("`best_of` above 1 cannot be streamed, since the best is known at the end")
    if stream and parameters.decoder_input_details:
        faults.append("`decoder_input_details` cannot be streamed")
    if truncate is not None and max_seq_len is not None and truncate >= max_seq_len:
        faults.append(f"`truncate` must be below {max_seq_len}, and is {truncate}")
    if faults:
        raise InvalidRequest("; ".join(faults), problems=faults)
    for name, given in (("watermark", parameters.watermark), ("adapter_id", parameters.adapter_id)):
        if given:
            raise Unsupported(f"`{name}` is not supported here: leave it out", feature=name)


def _sampling(parameters: TgiParameters) -> Sampling:
    values: dict[str, Any] = {
        "repetition_penalty": parameters.repetition_penalty,
        "frequency_penalty": parameters.frequency_penalty,
    }
    if is_drawn(parameters):
        values |= {
            "temperature": 1.0 if parameters.temperature is None else parameters.temperature,
            "top_k": parameters.top_k,
            "top_p": parameters.top_p,
            "typical_p": parameters.typical_p,
            "seed": parameters.seed,
        }
    return Sampling(**{name: value for name, value in values.items() if value is not None})


def _guide(parameters: TgiParameters) -> Guide | None:
    grammar = parameters.grammar
    if grammar is None:
        return None
    if isinstance(grammar, TgiRegexGrammar):
        return Guide(regex=grammar.value)
    if isinstance(grammar, TgiJsonSchemaGrammar):
        return Guide(json_schema=grammar.value.json_schema)
    return Guide(json_schema=grammar.value)
