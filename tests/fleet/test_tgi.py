"""TGI's routes before real workers: the same tokens, texts and numbers as the Python client gets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from gateway_process import Gateway
from streamfleet_common.schemas import Delta, Prefill
from streamfleet_producer import Client, GenerateRequest, Sampling
from tiny_model import tiny_model

PROMPT = "def number(self):"


@pytest.fixture
async def http(fleet_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        Gateway(fleet_url, tokenizers={"tiny": tiny_model()}) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        yield http


async def told(fleet: Client, request: GenerateRequest) -> tuple[list[Prefill], dict[str, list[Any]]]:
    """What the Python client's stream tells, token by token."""
    prefills: list[Prefill] = []
    said: dict[str, list[Any]] = {"ids": [], "texts": [], "logprobs": [], "top": []}
    async with fleet.stream(request) as tokens:
        async for event in tokens.events():
            if isinstance(event, Prefill):
                prefills.append(event)
            elif isinstance(event, Delta):
                said["ids"] += event.token_ids
                said["texts"] += event.texts
                said["logprobs"] += event.logprobs
                said["top"] += event.top_logprobs
    return prefills, said


async def test_tokens_are_those_of_the_python_client(fleet: Client, http: httpx.AsyncClient) -> None:
    request = GenerateRequest(
        prompt=PROMPT, max_tokens=8, logprobs=True, top_logprobs=3, prompt_logprobs=True
    )
    (prefill,), said = await told(fleet, request)
    parameters = {"max_new_tokens": 8, "details": True, "top_n_tokens": 3, "decoder_input_details": True}
    answer = await http.post("/generate", json={"inputs": PROMPT, "parameters": parameters})
    details = answer.json()["details"]
    tokens = details["tokens"]
    assert [token["id"] for token in tokens] == said["ids"]
    assert [token["text"] for token in tokens] == said["texts"]
    assert [token["logprob"] for token in tokens] == pytest.approx(said["logprobs"], abs=1e-4)
    assert answer.json()["generated_text"] == "".join(said["texts"])
    assert [token["id"] for token in details["prefill"]] == list(prefill.token_ids)
    assert "".join(token["text"] for token in details["prefill"]) == PROMPT
    assert details["prefill"][0]["logprob"] is None
    assert [token["logprob"] for token in details["prefill"][1:]] == pytest.approx(
        prefill.logprobs[1:], abs=1e-4
    )
    # With the model's tokenizer at hand the likeliest tokens have texts, too.
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    for place, likeliest in enumerate(details["top_tokens"]):
        assert [token["id"] for token in likeliest] == [token_id for token_id, _ in said["top"][place]]
        assert [token["text"] for token in likeliest] == [
            tokenizer.decode([token["id"]], clean_up_tokenization_spaces=False) for token in likeliest
        ]
    assert int(answer.headers["x-prompt-tokens"]) == len(prefill.token_ids)
    assert int(answer.headers["x-generated-tokens"]) == 8

    streamed = await http.post(
        "/generate_stream", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True}}
    )
    events = [json.loads(line[5:]) for line in streamed.text.split("\n") if line]
    assert [event["token"] for event in events] == tokens
    assert events[-1]["generated_text"] == answer.json()["generated_text"]
    assert events[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 8,
        "seed": None,
        "input_length": len(prefill.token_ids),
    }


async def test_a_seed_draws_what_the_python_client_draws_and_is_told(
    fleet: Client, http: httpx.AsyncClient
) -> None:
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.95, typical_p=0.6, seed=11)
    end = await fleet.run(GenerateRequest(prompt=PROMPT, max_tokens=8, sampling=sampling))
    parameters = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "typical_p": 0.6, "seed": 11}
    parameters["max_new_tokens"] = 8
    answer = (await http.post("/", json={"inputs": PROMPT, "parameters": parameters})).json()
    assert answer == [{"generated_text": PROMPT + end.text}]

    drawn = {"do_sample": True, "max_new_tokens": 6, "details": True, "best_of": 3}
    details = (await http.post("/generate", json={"inputs": PROMPT, "parameters": drawn})).json()["details"]
    sequences = [details, *details["best_of_sequences"]]
    means = [
        sum(token["logprob"] for token in sequence["tokens"]) / len(sequence["tokens"])
        for sequence in sequences
    ]
    assert means[0] == max(means)
    assert len({sequence["seed"] for sequence in sequences}) == 3
    # Each one's seed alone draws the same again.
    again = {"do_sample": True, "max_new_tokens": 6, "seed": details["seed"], "details": True}
    redone = (await http.post("/generate", json={"inputs": PROMPT, "parameters": again})).json()
    assert [token["id"] for token in redone["details"]["tokens"]] == [
        token["id"] for token in details["tokens"]
    ]


async def test_stops_cuts_and_grammars_have_their_effect(fleet: Client, http: httpx.AsyncClient) -> None:
    async def ask(inputs: str, **parameters: Any) -> dict[str, Any]:
        asked = {"inputs": inputs, "parameters": {"max_new_tokens": 12, "details": True, **parameters}}
        answer = await http.post("/generate", json=asked)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    plain, guided = await asyncio.gather(
        ask(PROMPT), ask(PROMPT, grammar={"type": "regex", "value": "[0-9]{3}"})
    )
    # A stop that begins and ends within tokens, at the end of the text that it stays in.
    text = plain["generated_text"]
    stop = text[3:6]
    stopped = await ask(PROMPT, stop=[stop])
    assert stopped["generated_text"] == text[: text.index(stop) + 3]
    assert stopped["details"]["finish_reason"] == "stop_sequence"

    assert re.fullmatch("[0-9]{3}", guided["generated_text"])
    assert guided["details"]["finish_reason"] == "eos_token"
    tokens = guided["details"]["tokens"]
    assert [token["special"] for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert tokens[-1]["text"] == "<|im_end|>"
    assert "".join(token["text"] for token in tokens[:-1]) == guided["generated_text"]

    cut = await ask(f"nothing of this is read {PROMPT}", truncate=4, decoder_input_details=True)
    whole = await ask(PROMPT, decoder_input_details=True)
    ids = [token["id"] for token in whole["details"]["prefill"]]
    assert [token["id"] for token in cut["details"]["prefill"]] == ids[-4:]


async def test_what_is_too_long_is_refused_before_it_is_queued(
    fleet: Client, http: httpx.AsyncClient
) -> None:
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 256}}
    tokens = len(AutoTokenizer.from_pretrained(tiny_model())(PROMPT).input_ids)
    for path in ("/generate", "/generate_stream"):  # a stream's refusal has a status, too
        answer = await http.post(path, json=asked)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        assert f"`inputs` of {tokens} tokens + `max_new_tokens` of 256" in answer.json()["error"]


async def test_info_tells_of_the_workers(fleet: Client, http: httpx.AsyncClient) -> None:
    (card, *_) = await fleet.models()
    told = (await http.get("/info")).json()
    assert (told["model_id"], told["max_total_tokens"]) == (card.model, 256)
    assert (told["model_dtype"], told["model_device_type"]) == (card.precision, card.device)
    assert (await http.get("/health")).status_code == 200
