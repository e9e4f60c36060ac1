"""Ends and deltas of the fleet in OpenAI's words: values by hand, and chunks that make the whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamfleet_common.one_shot import Embedding
from streamfleet_common.schemas import Choice, Delta, End, Prefill, Usage
from streamfleet_producer.gateway.openai_answers import Outcome, chat_answer, completion_answer
from streamfleet_producer.gateway.openai_chat_request import ChatWish, chat
from streamfleet_producer.gateway.openai_chunks import Chunks
from streamfleet_producer.gateway.openai_completion_request import CompletionWish, completion
from streamfleet_producer.gateway.openai_embedding import embeddings
from streamfleet_producer.gateway.openai_logprobs import unnamed
from streamfleet_producer.gateway.openai_schemas import ChatBody, CompletionBody, EmbeddingBody
from streamfleet_producer.gateway.openai_told import ChatTold, CompletionTold
from streamfleet_producer.shown import Shown

PREFILL = Prefill(
    token_ids=(1, 20, 21),
    texts=("<s>", "Hi", " you"),
    logprobs=(None, -1.0, -0.5),
    top_logprobs=((), ((20, -1.0),), ((22, -0.25),)),
)
WEATHER = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def completed(**fields: Any) -> CompletionWish:
    body = CompletionBody.model_validate_json(json.dumps({"prompt": "Hi you", **fields}))
    return completion(body, None)


def chatted(**fields: Any) -> ChatWish:
    messages = [{"role": "user", "content": "Hi"}]
    return chat(ChatBody.model_validate_json(json.dumps({"messages": messages, **fields})), None)


def choice(text: str, ids: tuple[int, ...], index: int = 0, reason: Any = "eos", **fields: Any) -> Choice:
    return Choice(index=index, text=text, token_ids=ids, finish_reason=reason, **fields)


def end(*choices: Choice, prompt: int = 3, cached: int = 0) -> End:
    made = sum(len(one.token_ids) for one in choices)
    usage = Usage(prompt_tokens=prompt, completion_tokens=made, cached_tokens=cached)
    return End(state="done", choices=choices, usage=usage, revision="r1")


def read(*deltas: Delta) -> dict[int, Any]:
    shown = Shown()
    for delta in deltas:
        shown.add(delta)
    return shown.lines


def payloads(stream: bytes) -> list[dict[str, Any]]:
    """The chunks before the last event, which says that it is the last."""
    *events, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_completion_of_two_prompts_numbers_its_choices_through() -> None:
    wish = completed(prompt=["a", "b"], n=2)
    outcomes = [
        Outcome("q:1", end(choice(" x", (5,), reason="length"), choice(" y", (6, 2), 1), cached=2)),
        Outcome("q:2", end(choice(" z", (7,), reason="stop"), choice("", (2,), 1))),
    ]
    answer = completion_answer(wish, outcomes, model="m", created=9)
    assert answer == {
        "id": "cmpl-q:1",
        "object": "text_completion",
        "created": 9,
        "model": "m",
        "system_fingerprint": "r1",
        "choices": [
            {"index": 0, "text": " x", "logprobs": None, "finish_reason": "length"},
            {"index": 1, "text": " y", "logprobs": None, "finish_reason": "stop"},
            {"index": 2, "text": " z", "logprobs": None, "finish_reason": "stop"},
            {"index": 3, "text": "", "logprobs": None, "finish_reason": "stop"},
        ],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 5,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_the_best_answers_are_those_of_the_highest_mean_log_probability() -> None:
    wish = completed(n=2, best_of=3)
    made = end(
        choice("sum -3, mean -1", (1, 2, 3), 0, logprobs=(-1.0, -1.0, -1.0)),
        choice("sum -2, mean -2", (4,), 1, logprobs=(-2.0,)),
        choice("sum -1, mean -0.5", (5, 6), 2, logprobs=(-0.75, -0.25)),
    )
    answer = completion_answer(wish, [Outcome("q:1", made)], model="m", created=9)
    told = [(one["index"], one["text"], one["logprobs"]) for one in answer["choices"]]
    assert told == [(0, "sum -1, mean -0.5", None), (1, "sum -3, mean -1", None)]
    assert answer["usage"]["completion_tokens"] == 6  # all that were made


def test_log_probabilities_of_a_completion_by_hand() -> None:
    # A character in two tokens, the second of which shows it; and an end token, which shows nothing.
    delta = Delta(
        token_ids=(7, 8, 9, 2),
        texts=(" a", "", "é", ""),
        logprobs=(-0.5, -0.25, -0.125, -1.0),
        top_logprobs=(((7, -0.5), (3, -1.5)), ((4, -0.0625),), (), ((2, -1.0),)),
    )
    made = end(choice(" aé", (7, 8, 9, 2)))
    answer = completion_answer(
        completed(logprobs=2), [Outcome("q:1", made, read(delta))], model="m", created=9
    )
    assert answer["choices"][0]["logprobs"] == {
        "tokens": [" a", "token_id:8", "é", "token_id:2"],
        "token_logprobs": [-0.5, -0.25, -0.125, -1.0],
        "top_logprobs": [
            {" a": -0.5, "token_id:3": -1.5},
            {"token_id:4": -0.0625, "token_id:8": -0.25},
            {"é": -0.125},
            {"token_id:2": -1.0},
        ],
        "text_offset": [0, 2, 2, 3],
    }


def test_an_echo_tells_the_prompt_s_tokens_first() -> None:
    delta = Delta(token_ids=(7,), texts=(" a",), logprobs=(-0.5,), top_logprobs=(((7, -0.5),),))
    outcome = Outcome("q:1", end(choice(" a", (7,))), read(delta), PREFILL)
    (told,) = completion_answer(completed(logprobs=1, echo=True), [outcome], model="m", created=9)["choices"]
    assert told["text"] == "Hi you a"
    # The token that opens a text is none of its characters.
    assert told["logprobs"] == {
        "tokens": ["<s>", "Hi", " you", " a"],
        "token_logprobs": [None, -1.0, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"Hi": -1.0},
            {"token_id:22": -0.25, " you": -0.5},
            {" a": -0.5},
        ],
        "text_offset": [0, 0, 2, 6],
    }


def test_tokens_that_nobody_read_are_told_by_their_numbers_or_by_their_names() -> None:
    made = end(choice(" a", (7,), logprobs=(-0.5,), top_logprobs=(((7, -0.5), (8, -1.0)),)))
    outcomes = [Outcome("q:1", made)]
    for names, first, second in (
        (unnamed, "token_id:7", "token_id:8"),
        ({7: " a", 8: " b"}.__getitem__, " a", " b"),
    ):
        answer = completion_answer(completed(logprobs=2), outcomes, model="m", created=9, names=names)
        logprobs = answer["choices"][0]["logprobs"]
        assert (logprobs["tokens"], logprobs["top_logprobs"]) == ([first], [{first: -0.5, second: -1.0}])


def test_a_chat_with_log_probabilities_tells_the_bytes_of_its_tokens() -> None:
    delta = Delta(token_ids=(7,), texts=("é",), logprobs=(-0.5,), top_logprobs=(((7, -0.5), (8, -2.0)),))
    outcome = Outcome("q:1", end(choice("é", (7,), reason="length")), read(delta))
    answer = chat_answer(chatted(logprobs=True, top_logprobs=2), outcome, model="m", created=9)
    e_acute = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    other = {"token": "token_id:8", "logprob": -2.0, "bytes": list(b"token_id:8")}
    assert answer["id"] == "chatcmpl-q:1"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "é", "refusal": None},
            "logprobs": {"content": [{**e_acute, "top_logprobs": [e_acute, other]}], "refusal": None},
            "finish_reason": "length",
        }
    ]


def test_calls_are_told_apart_from_content_and_bear_ids_that_stay() -> None:
    wish = chatted(tools=[WEATHER], n=2)
    made = end(choice(f"I look. {CALL}{CALL}", (5,)), choice("No call.", (6,), 1))
    first, second = chat_answer(wish, Outcome("q:1", made), model="m", created=9)["choices"]
    message = first["message"]
    assert (message["content"], first["finish_reason"]) == ("I look.", "tool_calls")
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    for call in message["tool_calls"]:
        assert call["type"] == "function"
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert "tool_calls" not in second["message"]
    assert (second["message"]["content"], second["finish_reason"]) == ("No call.", "stop")
    again = chat_answer(wish, Outcome("q:1", made), model="m", created=9)
    assert again["choices"] == [first, second]
    other = chat_answer(wish, Outcome("q:2", made), model="m", created=9)["choices"][0]["message"]
    assert {call["id"] for call in other["tool_calls"]}.isdisjoint(ids)


def test_no_more_than_one_call_where_more_are_not_wanted() -> None:
    made = end(choice(f"{CALL}{CALL}", (5,)))
    wish = chatted(tools=[WEATHER], parallel_tool_calls=False)
    (told,) = chat_answer(wish, Outcome("q:1", made), model="m", created=9)["choices"]
    assert len(told["message"]["tool_calls"]) == 1
    assert told["message"]["content"] is None
    chunks = payloads(_chat_stream(wish, [Delta(token_ids=(5,), texts=(f"{CALL}{CALL}",))], made))
    assert sum("tool_calls" in one["choices"][0]["delta"] for one in chunks) == 1


def test_text_that_looks_like_a_call_is_text_where_there_are_no_tools() -> None:
    (told,) = chat_answer(chatted(), Outcome("q:1", end(choice(CALL, (5,)))), model="m", created=9)["choices"]
    assert (told["message"]["content"], told["finish_reason"]) == (CALL, "stop")


# --- streams


def _chunks(name: str, *, tells_usage: bool = False) -> Chunks:
    return Chunks("i-q:1", name, created=9, model='m"', revision="", tells_usage=tells_usage)


def _chat_stream(wish: ChatWish, deltas: list[Delta], last: End, *, tells_usage: bool = False) -> bytes:
    chunks = _chunks("chat.completion.chunk", tells_usage=tells_usage)
    told = ChatTold("q:1", wish, chunks, unnamed, tells_usage=tells_usage)
    return b"".join(map(told.take, deltas)) + told.close(last)


def test_chunks_of_a_chat_by_hand() -> None:
    deltas = [Delta(token_ids=(5,), texts=('a"\n\u2028',)), Delta(token_ids=(6,), texts=("",))]
    last = end(choice('a"\n\u2028', (5, 6)), cached=1)
    head = {
        "id": "i-q:1",
        "object": "chat.completion.chunk",
        "created": 9,
        "model": 'm"',
        "system_fingerprint": None,
        "usage": None,
    }

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**head, "choices": [choice]}

    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert payloads(_chat_stream(chatted(), deltas, last, tells_usage=True)) == [
        chunk({"role": "assistant", "content": "", "refusal": None}),
        chunk({"content": 'a"\n\u2028'}),
        chunk({}, "stop"),
        {**head, "choices": [], "usage": usage},
    ]
    assert all("usage" not in one for one in payloads(_chat_stream(chatted(), deltas, last)))


def test_a_choice_that_says_nothing_has_its_role_all_the_same() -> None:
    chunks = payloads(_chat_stream(chatted(), [], end(choice("", (2,)))))
    assert [one["choices"][0]["delta"] for one in chunks] == [
        {"role": "assistant", "content": "", "refusal": None},
        {},
    ]


def test_a_choice_that_is_a_call_has_no_content_in_a_stream_either() -> None:
    wish, last = chatted(tools=[WEATHER]), end(choice(CALL, (5,)))
    chunks = payloads(_chat_stream(wish, [Delta(token_ids=(5,), texts=(CALL,))], last))
    assert [one["choices"][0]["delta"].get("content", "none") for one in chunks] == [None, "none", "none"]
    (whole,) = chat_answer(wish, Outcome("q:1", last), model="m", created=9)["choices"]
    assert whole["message"]["content"] is None


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_chunks_of_calls_make_the_message(size: int, logprobs: bool) -> None:
    text = f"I look. {CALL}\n{CALL} Done."
    wish = chatted(tools=[WEATHER], logprobs=logprobs)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [
        Delta(token_ids=(at,), texts=(piece,), logprobs=(-0.5,) if logprobs else ())
        for at, piece in enumerate(pieces)
    ]
    last = end(choice(text, tuple(range(len(pieces)))))
    (whole,) = chat_answer(wish, Outcome("q:1", last, read(*deltas)), model="m", created=9)["choices"]
    content, reason = "", None
    calls: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    for chunk in payloads(_chat_stream(wish, deltas, last)):
        (one,) = chunk["choices"]
        content += one["delta"].get("content") or ""
        calls += one["delta"].get("tool_calls", [])
        told += (one["logprobs"] or {}).get("content", [])
        reason = one["finish_reason"]
    assert content == whole["message"]["content"]
    assert [call.pop("index") for call in calls] == [0, 1]
    assert calls == whole["message"]["tool_calls"]
    assert told == (whole["logprobs"]["content"] if logprobs else [])
    assert reason == whole["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("echo", [False, True])
def test_chunks_of_a_completion_make_the_whole(echo: bool) -> None:
    wish = completed(prompt=["Hi you", "Hi you"], n=2, logprobs=1, echo=echo)

    def delta(index: int, *texts: str) -> Delta:
        ids = tuple(range(50, 50 + len(texts)))
        logprobs = tuple(-float(place) for place in range(len(texts)))
        top = tuple(((token_id, logprob),) for token_id, logprob in zip(ids, logprobs, strict=True))
        return Delta(index=index, token_ids=ids, texts=texts, logprobs=logprobs, top_logprobs=top)

    # Another choice may be ahead of the prompt's tokens, and a last text may have no token.
    cut = Delta(index=0, token_ids=(), texts=("!",))
    events: list[Delta | Prefill] = [
        delta(1, " x", " y"),
        *([PREFILL] if echo else []),
        delta(0, " a"),
        delta(0, " b"),
        cut,
    ]
    said = [event for event in events if isinstance(event, Delta)]
    last = end(choice(" a b!", (50, 50), reason="length"), choice(" x y", (50, 51), 1))
    outcome = Outcome("q:1", last, read(*said), PREFILL if echo else None)
    whole = completion_answer(wish, [outcome, outcome], model="m", created=9)
    told = CompletionTold(wish, _chunks("text_completion"), unnamed, tells_usage=False)
    stream = b"".join(told.take(place, event) for event in events for place in (0, 1))
    choices: dict[int, dict[str, Any]] = {}
    for chunk in payloads(stream + told.close([last, last])):
        (one,) = chunk["choices"]
        made = choices.setdefault(one["index"], {"index": one["index"], "text": "", "logprobs": {}})
        made["text"] += one["text"]
        made["finish_reason"] = one["finish_reason"]
        for name, values in (one["logprobs"] or {}).items():
            made["logprobs"].setdefault(name, []).extend(values)
    assert [choices[index] for index in range(4)] == whole["choices"]
    assert whole["choices"][0]["text"] == ("Hi you" if echo else "") + " a b!"


def test_vectors_in_order_as_numbers_and_as_base64() -> None:
    # 1.0 and -2.0 as float32, little-endian.
    first = Embedding(data=bytes.fromhex("0000803f000000c0"))
    second = Embedding(data=bytes.fromhex("000000000000803f"))
    ends = [
        End(state="done", embeddings=(first,), usage=Usage(prompt_tokens=3)),
        End(state="done", embeddings=(second,), usage=Usage(prompt_tokens=4)),
    ]
    body = EmbeddingBody(input=["a", "b"], encoding_format="float")
    assert embeddings(body, "m", ends) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, -2.0]},
            {"object": "embedding", "index": 1, "embedding": [0.0, 1.0]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    body = EmbeddingBody(input=["a", "b"], encoding_format="base64")
    told = [one["embedding"] for one in embeddings(body, "m", ends)["data"]]
    assert told == ["AACAPwAAAMA=", "AAAAAAAAgD8="]
