"""The clients that TGI's users have, as they come, before real workers: every method, and every error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway_process import Gateway
from hand_worker import HandWorker
from peer_environment import PeerEnvironment
from streamfleet_common.errors import GenerationFailed, IncompleteGeneration, StreamfleetError
from streamfleet_common.schemas import Delta, GenerateRequest
from streamfleet_producer import ChatMessage, Client, Sampling

CLIENTS = PeerEnvironment(
    "text-generation",
    (
        "text-generation==0.7.0",
        "aiohttp==3.14.5",
        "huggingface-hub==0.36.2",
        "pydantic==2.14.4",
        "requests==2.34.2",
    ),
)
SCRIPT = Path(__file__).parents[1] / "tgi_calls.py"
PROMPT = "def number(self):"
# The first test makes the environment.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def _clients() -> None:
    CLIENTS.prepare()


async def answers(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await CLIENTS.run(SCRIPT, calls)
    return found


def call(client: str, gateway: Gateway, method: str, **arguments: Any) -> dict[str, Any]:
    if client.endswith("Client") and method != "text_generation":
        arguments.setdefault("prompt", PROMPT)
    return {"client": client, "url": gateway.url, "method": method, "arguments": arguments}


@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
async def test_generate_gives_what_the_python_client_gives(
    fleet: Client, fleet_url: str, client: str
) -> None:
    end = await fleet.run(GenerateRequest(prompt=PROMPT, max_tokens=6, logprobs=True))
    drawn = await fleet.run(
        GenerateRequest(prompt=PROMPT, max_tokens=6, sampling=Sampling(temperature=0.8, top_p=0.9, seed=3))
    )
    async with Gateway(fleet_url) as gateway:
        plain, sampled, best, guided, stopped = await answers(
            call(
                client,
                gateway,
                "generate",
                max_new_tokens=6,
                decoder_input_details=True,
                top_n_tokens=2,
                return_full_text=True,
            ),
            call(client, gateway, "generate", max_new_tokens=6, temperature=0.8, top_p=0.9, seed=3),
            call(client, gateway, "generate", max_new_tokens=6, do_sample=True, best_of=2),
            call(
                client, gateway, "generate", max_new_tokens=9, grammar={"type": "regex", "value": "[0-9]{3}"}
            ),
            call(client, gateway, "generate", max_new_tokens=6, stop_sequences=[end.text[-4:-2]]),
        )
    details = plain["value"]["details"]
    assert plain["value"]["generated_text"] == PROMPT + end.text
    assert [token["id"] for token in details["tokens"]] == list(end.token_ids)
    assert [token["logprob"] for token in details["tokens"]] == pytest.approx(
        end.choices[0].logprobs, abs=1e-4
    )
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 6, None)
    assert "".join(token["text"] for token in details["prefill"]) == PROMPT
    assert [likeliest[0]["id"] for likeliest in details["top_tokens"]] == list(end.token_ids)
    assert sampled["value"]["generated_text"] == drawn.text
    assert sampled["value"]["details"]["seed"] == 3
    (other,) = best["value"]["details"]["best_of_sequences"]
    assert other["seed"] != best["value"]["details"]["seed"]
    assert guided["value"]["generated_text"].isdecimal()
    assert guided["value"]["details"]["finish_reason"] == "eos_token"
    assert stopped["value"]["generated_text"] == end.text[: end.text.index(end.text[-4:-2]) + 2]
    assert stopped["value"]["details"]["finish_reason"] == "stop_sequence"


@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
async def test_a_stream_gives_every_token_and_then_the_text(
    fleet: Client, fleet_url: str, client: str
) -> None:
    end = await fleet.run(GenerateRequest(prompt=PROMPT, max_tokens=6))
    guide = {"type": "regex", "value": "[0-9]{3}"}
    async with Gateway(fleet_url) as gateway:
        plain, guided = await answers(
            call(client, gateway, "generate_stream", max_new_tokens=6, top_n_tokens=2),
            call(client, gateway, "generate_stream", max_new_tokens=9, grammar=guide),
        )
    values = plain["values"]
    assert [value["token"]["id"] for value in values] == list(end.token_ids)
    assert [value["generated_text"] for value in values] == [None] * 5 + [end.text]
    assert values[-1]["details"] == {"finish_reason": "length", "generated_tokens": 6, "seed": None}
    assert all(len(value["top_tokens"]) == 2 for value in values)
    # As the client's own description puts texts together.
    shown = [v["token"]["text"] for v in guided["values"] if not v["token"]["special"]]
    assert "".join(shown) == guided["values"][-1]["generated_text"]
    assert guided["values"][-1]["token"]["special"]


@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
async def test_a_chat_is_answered_whatever_the_model_is_called(
    fleet: Client, fleet_url: str, client: str
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    request = GenerateRequest(
        messages=[ChatMessage(role="user", content="Hello")],
        max_tokens=5,
        sampling=Sampling(temperature=0.7, seed=2),
    )
    end = await fleet.run(request)
    async with Gateway(fleet_url) as gateway:
        (said,) = await answers(
            {
                "client": client,
                "url": gateway.url,
                "method": "chat",
                "arguments": {"messages": messages, "max_tokens": 5, "temperature": 0.7, "seed": 2},
            }
        )
    assert said["value"]["choices"][0]["message"]["content"] == end.text


@pytest.mark.parametrize("client", ["InferenceClient", "AsyncInferenceClient"])
async def test_the_hubs_client_reads_it_too(fleet: Client, fleet_url: str, client: str) -> None:
    end = await fleet.run(GenerateRequest(prompt=PROMPT, max_tokens=6))
    asked = {"prompt": PROMPT, "max_new_tokens": 6}
    async with Gateway(fleet_url) as gateway:
        text, told, shown, streamed, refused, model, health = await answers(
            call(client, gateway, "text_generation", **asked, return_full_text=False),
            call(client, gateway, "text_generation", **asked, details=True),
            call(client, gateway, "text_generation", **asked, stream=True),
            call(client, gateway, "text_generation", **asked, stream=True, details=True),
            call(client, gateway, "text_generation", prompt=PROMPT, max_new_tokens=5000),
            {"client": client, "url": gateway.url, "method": "get_endpoint_info", "arguments": {}},
            {"client": client, "url": gateway.url, "method": "health_check", "arguments": {}},
        )
    assert text == {"value": end.text}
    assert told["value"]["generated_text"] == PROMPT + end.text
    assert "".join(shown["values"]) == end.text
    assert streamed["values"][-1]["details"]["generated_tokens"] == 6
    assert refused["raised"] == "ValidationError"
    assert model["value"]["max_total_tokens"] == 256
    assert health == {"value": True}


@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
async def test_each_error_has_its_class(fleet: Client, fleet_url: str, client: str) -> None:
    async with Gateway(fleet_url) as gateway, Gateway(fleet_url, tgi_model="nobody") as lost:
        long, streamed, marked, unknown = await answers(
            call(client, gateway, "generate", max_new_tokens=5000),
            call(client, gateway, "generate_stream", max_new_tokens=5000),
            call(client, gateway, "generate", watermark=True),
            call(client, lost, "generate"),
        )
    for said in (long, streamed):
        assert said["raised"] == "ValidationError"
        assert "5000" in said["message"]
        assert "256" in said["message"]
    assert (marked["raised"], "watermark" in marked["message"]) == ("ValidationError", True)
    assert unknown["raised"] == "NotFoundError"


@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
async def test_failures_have_their_classes(redis_url: str, client: str) -> None:
    async with HandWorker(redis_url) as worker, Gateway(redis_url) as gateway:
        await worker.announce(max_queue_depth=1)

        async def failing(method: str, error: StreamfleetError) -> dict[str, Any]:
            asked = asyncio.create_task(answers(call(client, gateway, method)))
            (work,) = await worker.take()
            if work.envelope.stream:
                await worker.emit(work, Delta(token_ids=(1, 2), texts=("a", "b"), logprobs=(-1.0, -1.0)))
            await worker.fail(work, error)
            return (await asked)[0]

        broken = await failing("generate", GenerationFailed("broke"))
        assert (broken["raised"], "broke" in broken["message"]) == ("GenerationError", True)
        assert (await failing("generate", IncompleteGeneration("cut")))[
            "raised"
        ] == "IncompleteGenerationError"
        within = await failing("generate_stream", IncompleteGeneration("cut"))
        assert within["raised"] == "IncompleteGenerationError"
        assert [value["token"]["text"] for value in within["values"]] == ["a"]

        async with Client(redis_url, queue="q") as fleet:
            await fleet.submit(GenerateRequest(prompt="holds the only place"))
            (refused,) = await answers(call(client, gateway, "generate"))
        assert refused["raised"] == "OverloadedError"
