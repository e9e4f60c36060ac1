"""What is kept of one scope's requests is of no use to another's: nobody can measure what others ask."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from engine_driver import Driver
from item_models import Bench, ElsewhereRunner, ListRunner, equal
from reference_model import reference
from scripted_runner import ScriptedRunner
from streamfleet_common import schemas
from streamfleet_common.decisions import DecideRequest, Question
from streamfleet_common.one_shot import ClassifyRequest, EmbedRequest, RerankRequest
from streamfleet_worker.engine.answer_cache import AnswerCache
from streamfleet_worker.engine.encoder_model import load_encoder
from streamfleet_worker.engine.guide_compiler import GuideCompiler
from streamfleet_worker.engine.item import Done
from streamfleet_worker.engine.models import LoadedModel
from streamfleet_worker.engine.prefix_cache import BLOCK, PrefixCache, chain
from streamfleet_worker.engine.tasks.encoder_task import EncoderTask
from streamfleet_worker.engine.token_cache import TokenCache
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_encoder import tiny_encoder
from tiny_model import build_tokenizer

PROMPT = [random.Random(7).randrange(3, 1024) for _ in range(100)]
CACHED = 96
"""Whole blocks before the last token."""


def cached(driver: Driver, name: str) -> int:
    return driver.heard[name].finished.usage.cached_tokens


@pytest.fixture
def engine(llama: LoadedModel, drive: Callable[..., Driver]) -> Driver:
    return drive(llama, max_delay_s=0, max_batch_size=4, prefill_chunk=32)


# --- generation


def test_a_prompt_is_found_again_by_its_own_scope_alone(engine: Driver) -> None:
    scopes = {
        "a": "one",
        "b": "two",
        "a again": "one",
        "b again": "two",
        "c": "",
        "c again": "",
    }
    for name, scope in scopes.items():
        engine.add(name, scope=scope, prompt_token_ids=PROMPT, max_tokens=4)
        engine.run()
    found = {name: cached(engine, name) for name in scopes}
    assert found == {name: CACHED if "again" in name else 0 for name in scopes}
    expected = reference("llama").generate(PROMPT, 4)
    assert all(heard.token_ids == expected for heard in engine.heard.values())


def test_a_shorter_beginning_is_no_more_use(engine: Driver) -> None:
    engine.add("a", scope="one", prompt_token_ids=PROMPT, max_tokens=1)
    engine.run()
    found = {}
    for length in (2 * BLOCK, 5 * BLOCK, 90):
        engine.add(str(length), scope="two", prompt_token_ids=[*PROMPT[:length], 7], max_tokens=1)
        engine.run()
        found[length] = cached(engine, str(length))
    # Each finds what the one before it has left, and nothing of what the other scope has.
    assert found == {2 * BLOCK: 0, 5 * BLOCK: 2 * BLOCK, 90: 5 * BLOCK}


def test_scopes_do_not_wait_for_each_other_s_blocks(llama: LoadedModel, drive: Callable[..., Driver]) -> None:
    make = partial(
        drive, llama, runner=ScriptedRunner, max_delay_s=0, prefill_chunk=32, max_prefill_tokens=64
    )
    outcomes = {}
    for other in ("one", "two"):
        driver = make()
        driver.add("a", scope="one", prompt_token_ids=PROMPT, max_tokens=1)
        driver.add("b", scope=other, prompt_token_ids=PROMPT, max_tokens=1)
        driver.step()
        # Of its own scope it stands back; of another it is computed beside it.
        outcomes[other] = driver.engine.room().running
        driver.run()
        assert cached(driver, "b") == (CACHED if other == "one" else 0)
    assert outcomes == {"one": 1, "two": 2}


def test_the_chain_of_a_scope_has_no_digest_of_another_s() -> None:
    ids = tuple(PROMPT)
    chains = [chain(ids), chain(ids, "one"), chain(ids, "two"), chain(ids, "default")]
    digests = {digest for one in chains for digest in one}
    assert len(digests) == 4 * (len(ids) // BLOCK)
    assert chain(ids, "one") == chains[1]


def test_blocks_go_when_the_cache_is_full_whosever_they_are() -> None:
    class Values:
        bytes = 10

    cache = PrefixCache(30)
    for scope in ("one", "two"):
        cache.insert(tuple(PROMPT), 0, [Values(), Values()], scope)
    assert cache.bytes <= 30
    assert cache.match(tuple(PROMPT), scope="two")
    assert not cache.match(tuple(PROMPT), scope="three")


def test_a_form_is_compiled_once_for_each_scope() -> None:
    pytest.importorskip("llguidance")
    compiler = GuideCompiler(Tokenizer(build_tokenizer()), 1024, {2})
    form = schemas.Guide(choice=("yes", "no"))
    kept = compiler.compile(form, "one")
    assert compiler.compile(form, "one") is kept
    assert compiler.compile(form, "two") is not kept
    assert compiler.compile(form) not in (kept, compiler.compile(form, "two"))


# --- one-shot work


def test_equal_items_in_flight_are_computed_for_each_scope() -> None:
    fleet = Bench(ListRunner(), size=8, delay=1.0)
    for name, scope in {"a": "one", "b": "two", "c": "one", "d": ""}.items():
        fleet.ask(name, equal("x"), equal("y"), scope=scope)
    assert fleet.engine.room().waiting == 6
    fleet.run()
    assert fleet.runner.values == [["x", "y"] * 3]
    assert fleet.engine.counts["coalesced_items"] == 2
    assert all(fleet.ends[name].outputs == (("result", "x"), ("result", "y")) for name in "abcd")


def test_nor_is_one_that_runs_joined_from_elsewhere() -> None:
    runner = ElsewhereRunner(slots=2)
    fleet = Bench(runner, size=1, delay=0.0)
    fleet.ask("a", equal("x"), scope="one")
    fleet.step()
    fleet.ask("b", equal("x"), scope="two")
    fleet.ask("c", equal("x"), scope="one")
    fleet.step()
    assert len(runner.running) == 2
    runner.running[0].tell(Done(1))
    fleet.run_now()
    assert sorted(fleet.ends) == ["a", "c"]
    runner.running[1].tell(Done(2))
    fleet.run_now()
    assert fleet.ends["b"].outputs == (2,)


def test_answers_are_remembered_for_their_scope() -> None:
    fleet = Bench(ListRunner(), size=8, delay=0.0, answers=AnswerCache(10_000))
    scopes = {"a": "one", "b": "two", "c": "one", "d": "two", "e": ""}
    for name, scope in scopes.items():
        fleet.ask(name, equal("x"), scope=scope)
        fleet.run()
    assert fleet.runner.values == [["x"]] * 3
    assert fleet.engine.counts["answer_cache_hits"] == 2


def test_tokens_of_a_text_are_remembered_for_its_scope() -> None:
    encoded: list[str] = []

    def encode(text: str) -> tuple[int, ...]:
        encoded.append(text)
        return (len(text),)

    cache = TokenCache(encode, 10_000)
    for scope in ("one", "two", "one", "two", ""):
        assert cache.encode("heap", scope) == (4,)
    assert encoded == ["heap"] * 3
    assert cache.counts["tokenization_cache_hits"] == 2


QUESTION = Question(id="q", criteria="Is it a tree?", type="yes_no")


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        ("bert", EmbedRequest(texts=["a heap", "a tree"])),
        ("classifier", ClassifyRequest(texts=["a heap"])),
        ("classifier", ClassifyRequest(texts=["a heap"], pairs=["a tree"])),
        ("reranker", RerankRequest(query="a heap", documents=["a tree"])),
        ("reranker", DecideRequest(state="a heap", questions=[QUESTION])),
    ],
)
def test_no_kind_of_request_shares_its_tokens(kind: Any, request_: Any) -> None:
    task = EncoderTask(load_encoder(str(tiny_encoder(kind)), "cpu", "float32"), token_cache_bytes=1 << 20)

    def hits(scope: str) -> int:
        before = task.counts["tokenization_cache_hits"]
        task.prepare(request_, scope)
        return task.counts["tokenization_cache_hits"] - before

    assert hits("one") == 0
    assert hits("two") == 0
    assert hits("one") == hits("two") > 0
    assert hits("") == 0
