"""Lists in, lists out: how they are cut, put together, and what becomes of them when a part fails."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable
from typing import Any, cast

import pytest

from hand_worker import HandWorker
from streamfleet_common import codec
from streamfleet_common.errors import Cancelled
from streamfleet_producer import (
    ChatMessage,
    Classification,
    ClassifyRequest,
    Client,
    DeadlineExceeded,
    DecideRequest,
    Decision,
    Embedding,
    EmbedRequest,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    Label,
    ModelNotFound,
    Question,
    QueueFull,
    Rank,
    RerankRequest,
    TooLong,
    Unsupported,
    blocking,
    long_list,
)

TASKS = ("embed", "classify", "rerank", "decide")


@pytest.fixture
async def encoder(worker: HandWorker) -> HandWorker:
    await worker.announce(tasks=TASKS)
    return worker


def embedding(*numbers: float) -> Embedding:
    return Embedding(data=struct.pack(f"<{len(numbers)}f", *numbers))


def by_length(request: Any) -> dict[str, Any]:
    """Of each text a vector of its length and its first character."""
    return {"embeddings": tuple(embedding(len(text), ord(text[0])) for text in request.texts)}


async def test_texts_become_vectors(encoder: HandWorker, fleet: Client) -> None:
    async with encoder.serving(by_length) as asked:
        vectors = await fleet.embed(["ab", "c"], pooling="cls", normalize=False, dimensions=2, truncate=True)
    assert [list(vector) for vector in vectors] == [[2.0, 97.0], [1.0, 99.0]]
    assert [vector.typecode for vector in vectors] == ["f", "f"]
    assert asked == [
        EmbedRequest(texts=["ab", "c"], pooling="cls", normalize=False, dimensions=2, truncate=True)
    ]


async def test_texts_and_pairs_become_labels(encoder: HandWorker, fleet: Client) -> None:
    def answer(request: Any) -> dict[str, Any]:
        both = zip(request.texts, request.pairs or request.texts, strict=True)
        other = Label(label="other", score=0.25)
        found = [(Label(label=first + second, score=0.75), other) for first, second in both]
        return {"classifications": tuple(Classification(labels=labels) for labels in found)}

    async with encoder.serving(answer) as asked:
        alone = await fleet.classify(["a", "b"], top_k=2)
        paired = await fleet.classify(["a", "b"], pairs=["x", "y"], multi_label=True, truncate_side="left")
    assert [found.label for found in alone] == ["aa", "bb"]
    assert [found.label for found in paired] == ["ax", "by"]
    assert paired[1].labels[1] == Label(label="other", score=0.25)
    assert asked == [
        ClassifyRequest(texts=["a", "b"], top_k=2),
        ClassifyRequest(texts=["a", "b"], pairs=["x", "y"], multi_label=True, truncate_side="left"),
    ]
    with pytest.raises(InvalidRequest, match="1 pairs for 2 texts"):
        await fleet.classify(["a", "b"], pairs=["x"])


async def test_documents_are_ranked(encoder: HandWorker, fleet: Client) -> None:
    ranking = (Rank(index=1, score=0.5), Rank(index=0, score=0.25))
    async with encoder.serving(lambda _: {"ranking": ranking}) as asked:
        assert await fleet.rerank("q", ["a", "b", "c"], top_n=2, raw_scores=True) == list(ranking)
    assert asked == [RerankRequest(query="q", documents=["a", "b", "c"], top_n=2, raw_scores=True)]


def decided(request: Any) -> dict[str, Any]:
    return {
        "answers": tuple(
            Decision(
                id=question.id,
                option=question.choices[-1],
                probabilities=dict.fromkeys(question.choices, 1 / len(question.choices)),
                scores=dict.fromkeys(question.choices, -1.0),
            )
            for question in request.questions
        )
    }


async def test_questions_are_answered_by_their_ids(encoder: HandWorker, fleet: Client) -> None:
    questions = [
        Question(id="z", criteria="Is it?", type="yes_no"),
        Question(id="a", criteria="Which?", options=["x", "y", "z"]),
    ]
    async with encoder.serving(decided) as asked:
        answers = await fleet.decide(questions, state_json={"a": 1}, temperatures={2: 0.5}, truncate=True)
        await fleet.decide(questions[:1], messages=[ChatMessage(role="user", content="hello")])
    assert list(answers) == ["z", "a"]
    assert (answers["z"].option, answers["a"].option) == ("no", "z")
    assert asked[0] == DecideRequest(
        state_json={"a": 1}, questions=questions, temperatures={2: 0.5}, truncate=True
    )
    assert asked[1].messages == (ChatMessage(role="user", content="hello"),)


async def test_a_question_is_one_and_its_id_its_own(encoder: HandWorker, fleet: Client) -> None:
    question = Question(id="a", criteria="Is it?", type="yes_no")
    with pytest.raises(InvalidRequest, match=r"questions\.1: another question has this id"):
        await fleet.decide([question, question], state="s")
    with pytest.raises(InvalidRequest, match=r"questions\.0: a Question is wanted, not dict"):
        await fleet.decide(cast(Any, [{"id": "a"}]), state="s")
    with pytest.raises(InvalidRequest, match="give exactly one of state"):
        await fleet.decide([question])


async def test_nothing_is_asked_of_empty_lists(worker: HandWorker, fleet: Client) -> None:
    # The worker does none of these; whoever submitted anything would be refused.
    assert await fleet.embed([]) == []
    assert await fleet.classify([]) == []
    assert await fleet.rerank("q", []) == []
    assert await fleet.decide([], state="s") == {}
    assert await fleet.call_many("h", []) == []
    assert (await fleet.depth()).open == 0


@pytest.mark.parametrize(
    ("texts", "dimensions", "sizes"),
    [
        # A vector of 4,096 numbers and what is around it, 255 times in 4 MiB.
        (600, None, [255, 255, 90]),
        (600, 8192, [127, 127, 127, 127, 92]),
        (2100, 2, [1024, 1024, 52]),
    ],
)
async def test_a_long_list_is_cut_by_what_an_answer_holds(
    encoder: HandWorker, fleet: Client, texts: int, dimensions: int | None, sizes: list[int]
) -> None:
    asked_for = [f"{place % 7}" * (1 + place % 5) for place in range(texts)]
    async with encoder.serving(by_length) as asked:
        vectors = await fleet.embed(asked_for, dimensions=dimensions)
    assert [request.n for request in asked] == sizes
    assert [list(vector) for vector in vectors] == [[len(text), ord(text[0])] for text in asked_for]


@pytest.mark.parametrize("character", ["a", "é", "\U0001f40d"])
async def test_a_long_list_is_cut_by_the_bytes_of_a_request(
    encoder: HandWorker, redis_url: str, character: str
) -> None:
    await encoder.announce(tasks=TASKS, max_request_bytes=50_000)
    texts = [character * 1000] * 100
    async with Client(redis_url, queue="q") as fleet, encoder.serving(by_length) as asked:
        assert len(await fleet.embed(texts)) == 100
    lengths = [len(codec.encode(request)) for request in asked]
    assert max(lengths) <= 50_000
    # As few as can be: two neighbours would not fit one.
    assert min(first + second for first, second in itertools.pairwise(lengths)) > 50_000 - 4096


async def test_a_text_too_long_for_any_request_is_refused(encoder: HandWorker, fleet: Client) -> None:
    await encoder.announce(tasks=TASKS, max_request_bytes=5000)
    with pytest.raises(InvalidRequest, match="send less"):
        await fleet.embed(["a", "b" * 6000, "c"])


async def test_ranks_of_several_requests_are_one_order(encoder: HandWorker, fleet: Client) -> None:
    scores = [float(place * 7919 % 1000) for place in range(2500)]  # with equals

    def answer(request: Any) -> dict[str, Any]:
        found = [(scores[int(text)], place) for place, text in enumerate(request.documents)]
        found.sort(key=lambda pair: (-pair[0], pair[1]))
        return {"ranking": tuple(Rank(index=place, score=score) for score, place in found[: request.top_n])}

    documents = [str(place) for place in range(2500)]
    order = sorted(range(2500), key=lambda place: (-scores[place], place))
    async with encoder.serving(answer) as asked:
        ranks = await fleet.rerank("q", documents)
        best = await fleet.rerank("q", documents, top_n=5)
    assert [request.n for request in asked] == [1024, 1024, 452] * 2
    assert [rank.index for rank in ranks] == order
    assert [rank.score for rank in ranks] == [scores[place] for place in order]
    assert best == ranks[:5]


async def test_pairs_are_cut_with_their_texts(encoder: HandWorker, fleet: Client) -> None:
    def answer(request: Any) -> dict[str, Any]:
        both = zip(request.texts, request.pairs, strict=True)
        labels = [Label(label=f"{first} {second}", score=1.0) for first, second in both]
        return {"classifications": tuple(Classification(labels=(label,)) for label in labels)}

    firsts, seconds = [f"a{place}" for place in range(300)], [f"b{place}" for place in range(300)]
    async with encoder.serving(answer) as asked:
        found = await fleet.classify(firsts, pairs=seconds)
    assert len(asked) == 2
    assert [one.label for one in found] == [f"a{place} b{place}" for place in range(300)]


async def test_questions_are_cut_by_their_options(encoder: HandWorker, fleet: Client) -> None:
    questions = [
        Question(id=str(place), criteria="c", options=[str(number) for number in range(100)])
        for place in range(23)
    ]
    async with encoder.serving(decided) as asked:
        answers = await fleet.decide(questions, state="s")
    assert [len(request.questions) for request in asked] == [10, 10, 3]
    assert list(answers) == [str(place) for place in range(23)]


async def test_what_is_wrong_is_told_by_its_place_in_the_whole_list(
    encoder: HandWorker, fleet: Client
) -> None:
    texts = ["a"] * 600
    with pytest.raises(InvalidRequest, match=r"texts\.599 is empty") as caught:
        await fleet.embed([*texts[:599], " "])
    assert any("texts.599" in problem for problem in caught.value.problems)
    assert (await fleet.depth()).open == 0

    def answer(request: Any) -> dict[str, Any]:
        if "long" in request.texts:
            place = request.texts.index("long")
            raise TooLong(f"texts.{place}: too long", prompt_tokens=9, max_tokens=0, limit=8, item=place)
        return by_length(request)

    async with encoder.serving(answer):
        with pytest.raises(TooLong, match=r"texts\.300: too long") as refused:
            await fleet.embed([*texts[:300], "long", *texts[:100]])
    assert (refused.value.item, refused.value.limit) == (300, 8)
    assert refused.value.problems == ["texts.300: too long"]


async def test_a_handler_s_words_about_an_item_name_the_item_of_the_whole_list(
    encoder: HandWorker, fleet: Client
) -> None:
    def answer(request: Any) -> dict[str, Any]:
        if "bad" not in request.texts:
            return by_length(request)
        place = request.texts.index("bad")
        raise GenerationFailed(f"item {place}: NaN", item=place, retryable=False)

    async with encoder.serving(answer):
        with pytest.raises(GenerationFailed, match=r"^item 260: NaN$") as caught:
            await fleet.embed([*["a"] * 260, "bad"], retry="never")
    assert caught.value.item == 260


async def test_the_rest_of_a_list_that_fails_is_cancelled(encoder: HandWorker, fleet: Client) -> None:
    asking = asyncio.create_task(fleet.embed(["a"] * 600))
    first, *others = await encoder.take(3)
    await encoder.fail(first, GenerationFailed("broken"))
    with pytest.raises(GenerationFailed, match="broken"):
        await asking
    await eventually_cancelled(fleet, [work.rid for work in others])


async def test_a_caller_who_leaves_cancels_the_whole_list(encoder: HandWorker, fleet: Client) -> None:
    asking = asyncio.create_task(fleet.embed(["a"] * 600))
    works = await encoder.take(3)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await eventually_cancelled(fleet, [work.rid for work in works])


async def eventually_cancelled(fleet: Client, rids: list[str]) -> None:
    for rid in rids:
        with pytest.raises(Cancelled):
            await fleet.result(rid, timeout=60)


async def test_a_bounded_number_of_requests_is_in_flight(encoder: HandWorker, fleet: Client) -> None:
    asking = asyncio.create_task(fleet.embed(["a"] * (255 * 40)))
    works = await encoder.take(32)
    assert (await fleet.depth()).open == 32
    await encoder.answer(works[0], **by_length(works[0].envelope.request))
    (another,) = await encoder.take(1)
    assert (await fleet.depth()).open == 32
    async with encoder.serving(by_length):
        for work in [*works[1:], another]:
            await encoder.answer(work, **by_length(work.envelope.request))
        assert len(await asking) == 255 * 40


async def test_a_list_that_fills_the_queue_itself_goes_on_as_it_empties(
    encoder: HandWorker, redis_url: str
) -> None:
    await encoder.announce(tasks=TASKS, max_queue_depth=2)
    texts = [f"{place % 10}" for place in range(255 * 9)]
    async with Client(redis_url, queue="q", silence_s=60) as fleet:
        asking = asyncio.create_task(fleet.embed(texts))
        works = await encoder.take(2)
        assert (await fleet.depth()).open == 2
        async with encoder.serving(by_length):
            for work in works:
                await encoder.answer(work, **by_length(work.envelope.request))
            vectors = await asking
    assert [vector[1] for vector in vectors] == [ord(text) for text in texts]


async def test_a_queue_that_others_fill_is_full(
    encoder: HandWorker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_list, "MAX_REFUSALS", 1)  # each is a pause of a second
    await encoder.announce(tasks=TASKS, max_queue_depth=1)
    async with Client(redis_url, queue="q") as fleet:
        ticket = await fleet.submit(EmbedRequest(texts=["other"]))
        for texts in (["a"], ["a"] * 600):
            with pytest.raises(QueueFull):
                await fleet.embed(texts)
        assert (await fleet.depth()).open == 1
        # One of the list gets in; when it has ended the others are refused, and none is under way.
        await fleet.cancel(ticket.id)
        asking = asyncio.create_task(fleet.embed(["a"] * 600))
        [work] = await encoder.take()
        await encoder.redis.hset(encoder.broker.keys.control, "paused", 1)
        await encoder.answer(work, **by_length(work.envelope.request))
        with pytest.raises(QueueFull) as caught:
            await asking
        assert caught.value.reason == "paused"


async def test_the_timeout_is_for_the_whole_list(encoder: HandWorker, fleet: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        await fleet.embed(["a"] * 600, timeout=0.05)
    with pytest.raises(DeadlineExceeded):
        await fleet.embed(["a"], timeout=0.0)


async def test_a_worker_that_answers_too_little_is_not_believed(encoder: HandWorker, fleet: Client) -> None:
    async with encoder.serving(lambda _: {"embeddings": (embedding(1.0),), "ranking": ()}):
        with pytest.raises(IncompleteGeneration, match="1 answers where 2"):
            await fleet.embed(["a", "b"])
        with pytest.raises(IncompleteGeneration, match="0 answers where 1"):
            await fleet.rerank("q", ["a", "b"], top_n=1)


CALLS: list[Callable[[Client], Any]] = [
    lambda fleet: fleet.embed(["a"], model="other"),
    lambda fleet: fleet.classify(["a"], model="other"),
    lambda fleet: fleet.rerank("q", ["a"], model="other"),
    lambda fleet: fleet.decide([Question(id="a", criteria="c", type="yes_no")], state="s", model="other"),
]


@pytest.mark.parametrize("call", CALLS)
async def test_a_model_that_is_not_served(
    encoder: HandWorker, fleet: Client, call: Callable[[Client], Any]
) -> None:
    with pytest.raises(ModelNotFound, match="does not serve model 'other' but m"):
        await call(fleet)


async def test_work_that_is_not_done(worker: HandWorker, fleet: Client) -> None:
    with pytest.raises(Unsupported, match="does generate, not embed"):
        await fleet.embed(["a"])


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda fleet: fleet.embed("a text"), "texts: a list is wanted, not one text"),
        (lambda fleet: fleet.rerank("q", "a text"), "documents: a list is wanted, not one text"),
        (lambda fleet: fleet.classify(["a"], pairs="x"), "pairs: a list is wanted, not one text"),
        (lambda fleet: fleet.embed(7), "texts: a list is wanted, not int"),
        (lambda fleet: fleet.embed({"a": 1}), "texts: a list is wanted, not dict"),
        (lambda fleet: fleet.call_many("h", "abc"), "inputs: a list is wanted, not one text"),
        (lambda fleet: fleet.call_many("h", {"a": 1}), "inputs: a list is wanted, not dict"),
        (lambda fleet: fleet.embed(["a"], dimension=2), "dimension: no argument or option has this name"),
        (lambda fleet: fleet.embed([7]), r"texts\.0: Input should be a valid string$"),
        (lambda fleet: fleet.embed(["a", 7]), r"texts\.1: Input should be a valid string"),
        (lambda fleet: fleet.embed(["a", None]), r"texts\.1: Input should be a valid string"),
        (lambda fleet: fleet.embed([""]), r"texts\.0 is empty"),
        (lambda fleet: fleet.embed(["\ud800"]), "lone surrogate"),
        (lambda fleet: fleet.embed(["a" * 200_001]), r"texts\.0: String should have at most 200000"),
        (lambda fleet: fleet.embed(["a"], dimensions=0), "dimensions"),
        (lambda fleet: fleet.rerank(" ", ["a"]), "query is empty"),
        (lambda fleet: fleet.rerank(7, ["a"]), "query: Input should be a valid string"),
        (lambda fleet: fleet.rerank("q", ["a"], top_n=0), "top_n"),
        (lambda fleet: fleet.classify(["a"], top_k=-1), "top_k"),
        (lambda fleet: fleet.embed(["a"], lane="fast"), "lane"),
    ],
)
async def test_what_is_wrong_is_refused(
    encoder: HandWorker, fleet: Client, call: Callable[[Any], Any], place: str
) -> None:
    with pytest.raises(InvalidRequest, match=place):
        await call(fleet)


async def test_all_that_is_wrong_is_told(encoder: HandWorker, fleet: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await fleet.embed(cast(Any, [1, "a", None]), dimensions=0)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "texts.0",
        "texts.2",
        "dimensions",
    ]


def test_the_blocking_client_has_the_same(redis_url: str) -> None:
    async def announce() -> None:
        async with HandWorker(redis_url) as worker:
            await worker.announce(tasks=TASKS)

    asyncio.run(announce())
    with blocking.Client(redis_url, "q") as fleet:
        assert fleet.embed([]) == []
        assert fleet.decide([], state="s") == {}
        with pytest.raises(DeadlineExceeded):
            fleet.embed(["a"], timeout=0.05, lane="bulk")
        with pytest.raises(InvalidRequest, match="not one text"):
            fleet.rerank("q", "a text")
        assert fleet.classify([]) == []
