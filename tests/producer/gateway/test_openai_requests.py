"""OpenAI's bodies as requests of the fleet: every parameter taken, the others refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_common.schemas import ChatMessage, GenerateRequest, Guide, Sampling, Tool, ToolCall
from streamfleet_producer.gateway.forced_call import forced_call
from streamfleet_producer.gateway.openai_chat_request import ChatWish, chat
from streamfleet_producer.gateway.openai_completion_request import CompletionWish, completion
from streamfleet_producer.gateway.openai_embedding import embed_request, embedded_texts
from streamfleet_producer.gateway.openai_schemas import ChatBody, CompletionBody, EmbeddingBody

USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "It.", "parameters": {"type": "object"}, "strict": True},
}


def completed(**fields: Any) -> CompletionWish:
    body = CompletionBody.model_validate_json(json.dumps({"model": "m", "prompt": "Hi", **fields}))
    return completion(body, "m")


def chatted(**fields: Any) -> ChatWish:
    body = ChatBody.model_validate_json(json.dumps({"model": "m", "messages": [USER], **fields}))
    return chat(body, "m")


def test_a_bare_completion_has_openai_s_defaults_and_not_ours() -> None:
    wish = completed()
    sampling = Sampling(temperature=1.0)
    assert wish.requests == [GenerateRequest(model="m", prompt="Hi", max_tokens=16, sampling=sampling)]
    assert (wish.n, wish.logprobs, wish.echoes) == (1, None, False)


def test_a_bare_chat_draws_and_takes_all_the_room_that_there_is() -> None:
    wish = chatted()
    assert wish.request == GenerateRequest(
        model="m",
        messages=[ChatMessage(role="user", content="Hi")],
        max_tokens="fit",
        sampling=Sampling(temperature=1.0),
    )
    assert (wish.logprobs, wish.tools, wish.one_call) == (False, (), False)


def test_null_is_as_good_as_nothing() -> None:
    nothing = dict.fromkeys(CompletionBody.model_fields.keys() - {"prompt", "model"})
    assert completed(**nothing) == completed()
    nothing = dict.fromkeys(ChatBody.model_fields.keys() - {"messages", "model"})
    assert chatted(**nothing) == chatted()


def test_every_parameter_of_how_to_draw_arrives() -> None:
    wish = completed(
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={"50256": -100, "7": 2.5},
        seed=3,
        stop=["a", "b"],
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        truncate_prompt_tokens=4,
        bad_words=["no"],
        n=3,
    )
    assert wish.requests[0] == GenerateRequest(
        model="m",
        prompt="Hi",
        max_tokens=9,
        min_tokens=2,
        n=3,
        truncate=4,
        sampling=Sampling(
            temperature=0.5,
            top_p=0.75,
            top_k=7,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias={50256: -100.0, 7: 2.5},
            bad_words=["no"],
            seed=3,
        ),
        stop=["a", "b"],
        include_stop=True,
        stop_token_ids=[5],
        ignore_eos=True,
        skip_special_tokens=False,
    )


def test_what_others_write_otherwise_means_the_same() -> None:
    assert completed(top_k=-1) == completed(top_k=0) == completed()
    assert completed(stop="a").requests[0].stop == ("a",)
    # Of 64 bits, the sign included: ours has 63.
    assert completed(seed=-1).requests[0].sampling.seed == 2**63 - 1
    assert completed(temperature=0).requests[0].sampling == Sampling()


@pytest.mark.parametrize(
    ("prompt", "requests"),
    [
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1, 2], [3]], [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]),
    ],
)
def test_each_prompt_is_a_request_of_its_own(prompt: Any, requests: list[dict[str, Any]]) -> None:
    sampling = Sampling(temperature=1.0)
    assert completed(prompt=prompt).requests == [
        GenerateRequest(model="m", max_tokens=16, sampling=sampling, **fields) for fields in requests
    ]


def test_the_best_of_some_are_chosen_by_log_probabilities_that_nobody_asked_for() -> None:
    wish = completed(n=2, best_of=5)
    assert (wish.n, wish.requests[0].n, wish.requests[0].logprobs, wish.logprobs) == (2, 5, True, None)
    wish = completed(n=2, best_of=2)
    assert (wish.requests[0].n, wish.requests[0].logprobs) == (2, False)


def test_an_echo_with_log_probabilities_comes_token_by_token() -> None:
    wish = completed(echo=True)
    assert (wish.requests[0].echo, wish.requests[0].prompt_logprobs, wish.echoes) == (True, False, False)
    wish = completed(echo=True, logprobs=2)
    request = wish.requests[0]
    assert (request.echo, request.prompt_logprobs, wish.echoes) == (False, True, True)
    assert (request.logprobs, request.top_logprobs, wish.prompts) == (True, 2, ["Hi"])
    # What is cut is not known here.
    assert completed(echo=True, logprobs=2, truncate_prompt_tokens=3).prompts == [None]


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"guided_json": {"type": "object"}}, Guide(json_schema={"type": "object"})),
        ({"guided_json": '{"type": "object"}'}, Guide(json_schema='{"type": "object"}')),
        ({"guided_regex": "a+"}, Guide(regex="a+")),
        ({"guided_choice": ["a", "b"]}, Guide(choice=["a", "b"])),
        ({"structured_outputs": {"json": {"type": "null"}}}, Guide(json_schema={"type": "null"})),
        ({"structured_outputs": {"regex": "a+"}}, Guide(regex="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Guide(choice=["a"])),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide(json_schema={"type": "object"})),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}},
            Guide(json_schema={"a": 1}),
        ),
    ],
)
def test_the_form_of_an_answer_may_be_said_in_several_ways(
    fields: dict[str, Any], guide: Guide | None
) -> None:
    assert chatted(**fields).request.guide == guide
    if "response_format" not in fields:
        assert completed(**fields).requests[0].guide == guide


def test_all_kinds_of_turns_become_ours() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    said: dict[str, Any] = {
        "role": "assistant",
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {**said, "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {**said, "content": "Seven.", "tool_calls": None},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
    ]
    assert chatted(messages=messages).request.messages == (
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="system", content="And\nkind."),
        ChatMessage(role="user", content="Hi", name="Ann"),
        ChatMessage(role="assistant", tool_calls=[ToolCall(id="c1", name="weather", arguments='{"a": 1}')]),
        ChatMessage(role="tool", content="7", tool_call_id="c1"),
        ChatMessage(role="assistant", content="Seven."),
        ChatMessage(role="assistant", content="No."),
        ChatMessage(role="assistant", content="Never."),
    )


def test_the_newer_name_of_the_longest_answer_counts() -> None:
    assert chatted(max_tokens=5).request.max_tokens == 5
    assert chatted(max_tokens=5, max_completion_tokens=7).request.max_tokens == 7


def test_tools_are_shown_to_the_model_unless_none_may_be_called() -> None:
    tool = Tool(name="weather", description="It.", parameters={"type": "object"})
    wish = chatted(tools=[WEATHER], parallel_tool_calls=False)
    assert (wish.request.tools, wish.tools, wish.one_call) == ((tool,), (tool,), True)
    assert wish.request.guide is None
    wish = chatted(tools=[WEATHER], tool_choice="none")
    assert (wish.request.tools, wish.tools) == ((), ())
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        wish = chatted(tools=[WEATHER], tool_choice=choice)
        assert (wish.request.tools, wish.tools) == ((tool,), (tool,))
        assert wish.request.guide == forced_call([tool])


def test_log_probabilities_of_a_chat() -> None:
    wish = chatted(logprobs=True, top_logprobs=3)
    assert (wish.logprobs, wish.request.logprobs, wish.request.top_logprobs) == (True, True, 3)
    assert not chatted(logprobs=False).request.logprobs


def test_what_changes_nothing_here_is_taken() -> None:
    ignored: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "x"},
    }
    assert completed(**ignored) == completed()
    assert chatted(**ignored, modalities=["text"], reasoning_effort="none", verbosity="medium") == chatted()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"suffix": "end"}, "suffix: not supported"),
        ({"n": 3, "best_of": 2}, "best_of: it (2) is below n (3)"),
        ({"best_of": 2, "stream": True}, "best_of: which"),
        ({"prompt": ["a"] * 17, "n": 61}, "prompt: 17 prompts with 61 answers each are over 1024"),
        ({"min_tokens": 20}, "min_tokens (20) is above max_tokens (16)"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": ["a", " "]}, "prompt.1 is empty"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias.2147483648: "),
        ({"guided_json": "{", "stop": "a"}, "guided_json: a JSON document is wanted"),
        ({"guided_regex": ""}, "guided_regex: "),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice: the answer has a form already"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens and guide exclude each other"),
    ],
)
def test_a_completion_that_cannot_be_had_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completed(**fields)
    (found,) = caught.value.problems
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"audio": {"voice": "x"}}, "audio: not supported"),
        ({"functions": [{"name": "f"}]}, "functions: not supported: use tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort: not supported"),
        ({"modalities": ["text", "audio"]}, "modalities: not supported"),
        ({"web_search_options": {"a": 1}}, "web_search_options: not supported"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages.0.role: not supported"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.1.content.0.type: not supported",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type: not supported"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.type: not supported",
        ),
        (
            {"tools": [WEATHER], "response_format": {"type": "json_object"}},
            "response_format: not supported together with tools",
        ),
    ],
)
def test_what_nothing_here_can_do_is_refused_as_unsupported(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(Unsupported) as caught:
        chatted(**fields)
    (found,) = caught.value.problems
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"top_logprobs": 2}, "top_logprobs: it needs logprobs"),
        ({"tool_choice": "required"}, "tool_choice: a tool must be called"),
        ({"tools": [{"type": "function"}]}, "tools.0.function: it is missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: "),
        ({"messages": [{"role": "user"}]}, "messages.0.content: it is missing"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "c"}]}, "messages.0: tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages.0: an assistant's turn has neither"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: "),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: it is missing"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "["}}]}
                ]
            },
            "messages.0.tool_calls.0.function.arguments: ",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "no tool has the name wanted",
        ),
    ],
)
def test_a_chat_that_is_wrong_is_refused_by_the_place_of_the_fault(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chatted(**fields)
    assert not isinstance(caught.value, Unsupported)
    assert caught.value.problems[0].startswith(problem)


@pytest.mark.parametrize(
    "fields",
    [
        {"temprature": 1},
        {"temperature": -1},
        {"temperature": "1"},
        {"max_tokens": 0},
        {"n": 65},
        {"stop": ["a"] * 9},
        {"stop": ""},
        {"logprobs": 21},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a", [1]]},
        {"prompt": ["a"] * 129},
        {"logit_bias": {"x": 1}},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_bodies_out_of_bounds_are_none(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        completed(**fields)
    assert len(caught.value.errors()) == 1


def embedded(**fields: Any) -> EmbeddingBody:
    return EmbeddingBody.model_validate_json(json.dumps({"model": "m", **fields}))


def test_texts_to_be_embedded() -> None:
    assert embedded_texts(embedded(input="a")) == ["a"]
    body = embedded(input=["a", "b"], dimensions=8, truncate=True)
    assert embedded_texts(body) == ["a", "b"]
    request = embed_request(body, ["b"], "m")
    assert (request.texts, request.model, request.dimensions, request.truncate) == (("b",), "m", 8, True)
    for ids in ([1, 2], [[1, 2], [3]]):
        with pytest.raises(Unsupported, match="token ids"):
            embedded_texts(embedded(input=ids))
    with pytest.raises(InvalidRequest, match=r"input\.1: it is empty"):
        embedded_texts(embedded(input=["a", ""]))
