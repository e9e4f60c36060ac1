"""TGI's parameters: which are taken, what they become, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_common.schemas import GenerateRequest, Guide, Sampling
from streamfleet_producer.gateway.tgi_request import request_of
from streamfleet_producer.gateway.tgi_schemas import TgiGenerateBody

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def body(inputs: str = "Hello", **parameters: Any) -> TgiGenerateBody:
    return TgiGenerateBody.model_validate_json(json.dumps({"inputs": inputs, "parameters": parameters}))


def of(inputs: str = "Hello", *, stream: bool = False, **parameters: Any) -> GenerateRequest:
    return request_of(body(inputs, **parameters), stream=stream, max_seq_len=256)


def test_nothing_said_is_100_greedy_tokens() -> None:
    bare = request_of(TgiGenerateBody.model_validate_json('{"inputs": "Hello"}'), model="m")
    assert bare == GenerateRequest(model="m", prompt="Hello", max_tokens=100)
    assert of() == GenerateRequest(prompt="Hello", max_tokens=100)
    assert of(max_new_tokens=None, temperature=None, stop=None, grammar=None) == of()


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [
        ({"do_sample": True}, Sampling(temperature=1.0)),
        ({"do_sample": True, "seed": 7}, Sampling(temperature=1.0, seed=7)),
        ({"temperature": 0.5}, Sampling(temperature=0.5)),
        ({"temperature": 1}, Sampling(temperature=1.0)),
        ({"top_k": 3}, Sampling(temperature=1.0, top_k=3)),
        ({"top_p": 0.9}, Sampling(temperature=1.0, top_p=0.9)),
        ({"typical_p": 0.5}, Sampling(temperature=1.0, typical_p=0.5)),
        ({"seed": 7}, Sampling()),
        ({"repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
        ({"frequency_penalty": -2.0}, Sampling(frequency_penalty=-2.0)),
    ],
)
def test_tokens_are_drawn_where_sampling_is_asked_for(parameters: dict[str, Any], sampling: Sampling) -> None:
    assert of(**parameters).sampling == sampling


def test_everything_that_is_told_comes_from_the_wire() -> None:
    assert not of(top_n_tokens=5).logprobs
    assert of(details=True).logprobs
    assert of(stream=True).logprobs
    told = of(details=True, top_n_tokens=5, decoder_input_details=True)
    assert (told.logprobs, told.top_logprobs, told.prompt_logprobs) == (True, 5, True)
    several = of(best_of=3, do_sample=True)
    assert (several.n, several.logprobs) == (3, True)


def test_stop_sequences_stay_in_the_text_and_the_prompts_end_is_kept() -> None:
    request = of(stop=["END", "."], truncate=16)
    assert (tuple(request.stop), request.include_stop) == (("END", "."), True)
    assert (request.truncate, request.truncate_side) == (16, "left")


@pytest.mark.parametrize(
    ("grammar", "guide"),
    [
        ({"type": "json", "value": SCHEMA}, Guide(json_schema=SCHEMA)),
        ({"type": "json", "value": json.dumps(SCHEMA)}, Guide(json_schema=json.dumps(SCHEMA))),
        ({"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}}, Guide(json_schema=SCHEMA)),
        ({"type": "regex", "value": "[0-9]{4}"}, Guide(regex="[0-9]{4}")),
    ],
)
def test_a_grammar_is_a_guide(grammar: dict[str, Any], guide: Guide) -> None:
    assert of(grammar=grammar).guide == guide


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.0}, "top_p"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"typical_p": 1.0}, "typical_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 65, "do_sample": True}, "best_of"),
        ({"truncate": 0}, "truncate"),
        ({"seed": -1}, "seed"),
        ({"top_n_tokens": 21}, "top_n_tokens"),
        ({"stop": ["a"] * 9}, "stop"),
        ({"stop": [""]}, "stop.0"),
        ({"do_sample": "true"}, "do_sample"),
        ({"grammar": {"type": "xml", "value": "x"}}, "grammar"),
        ({"grammar": {"type": "regex", "value": ""}}, "grammar.regex.value"),
        ({"temprature": 0.5}, "temprature"),
    ],
)
def test_what_is_out_of_bounds_is_no_body(parameters: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        body(**parameters)
    assert ".".join(map(str, caught.value.errors()[0]["loc"])) == f"parameters.{place}"


@pytest.mark.parametrize(
    ("inputs", "stream", "parameters", "names"),
    [
        ("", False, {}, "`inputs`"),
        ("Hello", False, {"best_of": 2}, "`do_sample`"),
        ("Hello", False, {"best_of": 2, "do_sample": True, "seed": 1}, "`seed`"),
        ("Hello", True, {"best_of": 2, "do_sample": True}, "streamed"),
        ("Hello", True, {"decoder_input_details": True}, "`decoder_input_details`"),
        ("Hello", False, {"truncate": 256}, "256"),
        ("Hello", False, {"grammar": {"type": "json", "value": "{"}}, "json_schema"),
        ("Hello", False, {"grammar": {"type": "json", "value": ""}}, "json_schema"),
    ],
)
def test_what_does_not_go_together_is_refused(
    inputs: str, stream: bool, parameters: dict[str, Any], names: str
) -> None:
    with pytest.raises(InvalidRequest, match=names):
        of(inputs, stream=stream, **parameters)


@pytest.mark.parametrize("parameters", [{"watermark": True}, {"adapter_id": "a/b"}])
def test_what_would_change_the_answer_and_is_not_there_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        of(**parameters)
    assert caught.value.feature == next(iter(parameters))


def test_as_many_faults_as_there_are_are_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        of("", best_of=2, seed=1)
    assert len(caught.value.problems) == 3
