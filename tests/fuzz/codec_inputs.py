"""Hostile bytes for the codec: nothing but the errors it promises, no hang, no memory without bound.

    python tests/fuzz/codec_inputs.py [--inputs 1000000] [--seed 1]

The inputs are good messages with something changed in them; `codec_led.py` has others. What decodes is
encoded again and must mean the same.
"""

from __future__ import annotations

import argparse
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import msgpack

from mutation import Mutation
from streamfleet_common import codec
from streamfleet_common.cards import Card, Limits
from streamfleet_common.decisions import DecideRequest, Question
from streamfleet_common.errors import InvalidRequest, StreamfleetError
from streamfleet_common.frames import Frame
from streamfleet_common.message import Message
from streamfleet_common.one_shot import CallRequest, ClassifyRequest, Embedding, EmbedRequest, RerankRequest
from streamfleet_common.records import Record
from streamfleet_common.schemas import (
    ChatMessage,
    Choice,
    Delta,
    End,
    Envelope,
    Failure,
    GenerateRequest,
    Parts,
    Prefill,
    Request,
    Sampling,
    Start,
    Tool,
)

HANG_S = 30
REQUESTS: tuple[Request, ...] = (
    GenerateRequest(
        prompt="a prompt", max_tokens=7, sampling=Sampling(temperature=0.5, seed=3, logit_bias={1: 2.0})
    ),
    GenerateRequest(
        messages=[ChatMessage(role="user", content="hi")],
        tools=[Tool(name="f", parameters={"type": "object"})],
    ),
    DecideRequest(state="s", questions=[Question(id="q", criteria="c", options=("yes", "no"))]),
    EmbedRequest(texts=("a", "b"), pooling="mean"),
    ClassifyRequest(texts=("a",), pairs=("b",)),
    RerankRequest(query="q", documents=("a", "b"), top_n=1),
    CallRequest(handler="h", input={"x": [1, 2.5, None, {"y": "z"}]}),
)
EVENTS: tuple[Message, ...] = (
    Start(worker="w", model="m", exact="e"),
    Prefill(token_ids=(1, 2), texts=("a", "b"), logprobs=(None, -0.5)),
    Delta(token_ids=(3,), texts=("c",), logprobs=(-1.0,), top_logprobs=(((3, -1.0), (4, -2.0)),)),
    Parts(values=(1, {"a": [2]})),
    End(
        state="done",
        choices=(Choice(text="abc", token_ids=(1, 2), finish_reason="eos", last_token_id=2),),
        embeddings=(Embedding(data=b"\0\0\x80?"),),
        memory={"weights": 7},
    ),
    End(state="failed", error=Failure(code="generation_failed", message="no", details={"retryable": True})),
)
CARD = Card(
    worker="w",
    queue="q",
    model="m",
    limits=Limits(max_batch_size=8, max_seq_len=100, max_queue_depth=10, max_request_bytes=1000),
)
RECORDS = (
    b"Q1795965238596|0|n1795964638596-0||0|0|0|0|1795964638596|n|s|600000|0.0.r|129|default|5f70",
    b"R1795965238596|1|n3.1795964638596-0|host:77:1e3f|1795964638610|1|0|0|1795964638596|n|s|600000|0.0.r|9|t|5f",
    b"ED|0|0|default|5f70\n2-1,1795964638596,1795964638610,1795964638629,1 \x82\xa1v\x01",
)
Decode = Callable[[bytes], Any]
DOORS: tuple[Decode, ...] = (
    codec.decode_envelope,
    codec.decode_event,
    codec.decode_card,
    Frame.parse,
    Record.parse,
)


def seeds() -> list[tuple[int, bytes]]:
    """Good messages, each with the number of its door."""
    found = [(0, codec.encode_envelope(Envelope(request=request))[0]) for request in REQUESTS]
    found += [(1, codec.encode(event)) for event in EVENTS]
    found += [(2, codec.encode(CARD))]
    found += [(3, b"1-3 " + codec.encode(EVENTS[2])), (3, b"2-1,1,2,3,1 " + codec.encode(EVENTS[4]))]
    return found + [(4, record) for record in RECORDS]


def enter(door: int, data: bytes) -> bool:
    """Whether the bytes are a message. Anything but the promised errors comes out."""
    try:
        message = DOORS[door](data)
    except StreamfleetError:
        return False
    if door < 3:
        again = codec.encode_envelope(message)[0] if door == 0 else codec.encode(message)
        if DOORS[door](again) != message:
            raise AssertionError(f"encoded again it means something else: {data!r}")
    elif door == 3:
        try:
            message.event()
        except InvalidRequest:
            return False
    return True


def run(inputs: int, seed: int) -> dict[str, int]:
    """Changed good messages; gives what became of them, and how many KiB memory grew by."""
    mutation, good = Mutation(seed), seeds()
    taken = sum(enter(door, data) for door, data in good)
    if taken != len(good):
        raise AssertionError(f"of {len(good)} good messages {taken} were taken")
    values = [(door, msgpack.unpackb(data)) for door, data in good if door < 3]
    before, taken = _memory(), 0
    for number in range(inputs):
        if number % 1000 == 0:
            signal.alarm(HANG_S)  # ends the process: nothing here may take so long
        if number % 2:
            door, data = mutation.one_of(good)
            data = mutation.data(data)
        else:
            door, value = mutation.one_of(values)
            try:
                data = msgpack.packb(mutation.value(value), unicode_errors="surrogatepass")
            except (OverflowError, ValueError):
                continue  # no msgpack has such a number, or is so deep
        taken += enter(door, data)
    signal.alarm(0)
    return {"inputs": inputs, "taken": taken, "refused": inputs - taken, "grown_kib": _memory() - before}


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Hostile bytes for the codec.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    found = run(options.inputs, options.seed)
    seconds = time.monotonic() - began
    print(", ".join(f"{name} {number:,}" for name, number in found.items()), f"in {seconds:.0f} s")


if __name__ == "__main__":
    main()
