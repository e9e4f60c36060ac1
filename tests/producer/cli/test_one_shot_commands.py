"""The one-shot commands against a worker played by hand: files in and out, order, failures, going on."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from command import LIMIT_S, PROGRAM, environment, running
from eventually import eventually
from hand_worker import HandWorker
from played_worker import played
from streamfleet_common.decisions import DecideRequest, Decision, Question
from streamfleet_common.errors import GenerationFailed, TooLong
from streamfleet_common.one_shot import (
    CallRequest,
    Classification,
    ClassifyRequest,
    Embedding,
    EmbedRequest,
    HandlerCard,
    Label,
    Rank,
    RerankRequest,
)
from streamfleet_common.schemas import ChatMessage, Parts
from streamfleet_producer.cli.app import app
from streamfleet_producer.client import Client

Call = Callable[..., Result]
TASKS = ("embed", "classify", "rerank", "decide")


@pytest.fixture
def call(redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run a command in this process, in an empty folder, on the queue `q`."""
    monkeypatch.setenv("STREAMFLEET_REDIS_URL", redis_url)
    monkeypatch.setenv("STREAMFLEET_QUEUE", "q")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, arguments, input=stdin)

    return call


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def embedding(*numbers: float) -> Embedding:
    return Embedding(data=struct.pack(f"<{len(numbers)}f", *numbers))


def vectors(request: Any) -> dict[str, Any]:
    """Of each text its length and its first character; some cannot be done."""
    for place, text in enumerate(request.texts):
        if text.startswith("long"):
            raise TooLong(f"texts.{place} is too long", prompt_tokens=9, max_tokens=0, limit=8)
        if text.startswith("bad"):
            raise GenerationFailed(f"item {place}: NaN", item=place)
    return {"embeddings": tuple(embedding(len(text), ord(text[0])) for text in request.texts)}


# --- embed


def test_texts_become_lines(call: Call, redis_url: str) -> None:
    with played(redis_url, vectors, tasks=TASKS) as asked:
        done = call("embed", "ab", "c")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == '{"embedding": [2.0, 97.0]}\n{"embedding": [1.0, 99.0]}\n'
    assert asked == [EmbedRequest(texts=["ab", "c"])]


def test_every_option_of_embed_reaches_the_worker(call: Call, redis_url: str) -> None:
    with played(redis_url, vectors, tasks=TASKS) as asked:
        done = call(
            *("embed", "a", "b", "--pooling", "mean", "--no-normalize", "--dimensions", "2", "--model", "m"),
            *("--truncate", "--truncate-side", "left", "--lane", "bulk", "--deadline", "9"),
        )
    assert done.exit_code == 0
    assert asked == [
        EmbedRequest(
            texts=["a", "b"],
            pooling="mean",
            normalize=False,
            dimensions=2,
            model="m",
            truncate=True,
            truncate_side="left",
        )
    ]


def test_numbers_have_the_digits_that_a_float32_has(call: Call, redis_url: str) -> None:
    numbers = (0.1, 1 / 3, 1e-45, 3.4028234663852886e38, -0.0)

    def answer(request: Any) -> dict[str, Any]:
        return {"embeddings": (embedding(*numbers),) * request.n}

    with played(redis_url, answer, tasks=TASKS):
        told = call("embed", "a", "b").stdout
        packed = lines(call("embed", "a", "b", "--format", "base64").stdout)
    assert (
        told.splitlines()[0]
        == '{"embedding": [0.100000001, 0.333333343, 1.40129846e-45, 3.40282347e+38, -0.0]}'
    )
    data = struct.pack("<5f", *numbers)
    assert struct.pack("<5f", *lines(told)[1]["embedding"]) == data
    assert [base64.b64decode(line["embedding"]) for line in packed] == [data, data]


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_a_file_of_texts(call: Call, redis_url: str, tmp_path: Path, how: str) -> None:
    texts = [f"{'x' * (place % 9)}{place}" for place in range(1000)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    with played(redis_url, vectors, tasks=TASKS) as asked:
        if how == "file":
            done = call("embed", "in.txt", "--output", "out.jsonl", "--text")
        else:
            done = call("embed", "-", "-o", "out.jsonl", "--text", stdin="\n".join(texts))
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    assert lines((tmp_path / "out.jsonl").read_text()) == [
        {"text": text, "embedding": [len(text), ord(text[0])]} for text in texts
    ]
    assert max(request.n for request in asked) == 32


def test_json_lines_keep_their_other_fields(call: Call, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"id": 7, "text": "ab"}\n{"text": "c", "pair": "kept", "n": [1]}\n'
        '{"id": 8}\nno json\n[1]\n{"text": 5}\n'
    )
    with played(redis_url, vectors, tasks=TASKS):
        done = call("embed", "in.jsonl", "--jsonl")
        kept = call("embed", '{"id": 7, "text": "ab"}', "--jsonl", "--text")
    assert done.exit_code == 1
    found = lines(done.stdout)
    assert found[:2] == [
        {"id": 7, "embedding": [2.0, 97.0]},
        {"pair": "kept", "n": [1], "embedding": [1.0, 99.0]},
    ]
    assert [line["error"]["code"] for line in found[2:]] == ["invalid_request"] * 4
    assert "4 of 6 lines failed" in done.stderr
    assert lines(kept.stdout) == [{"id": 7, "text": "ab", "embedding": [2.0, 97.0]}]


def test_lines_that_failed_are_lines_to_ask_about(call: Call, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "bad a"}\n{"text": "b", "error": "the user\'s own"}\n')
    with played(redis_url, vectors, tasks=TASKS):
        assert call("embed", "in.jsonl", "--jsonl", "--text", "-o", "out.jsonl").exit_code == 1
        failed = Path("out.jsonl").read_text().splitlines()[0]
        done = call("embed", "-", "--jsonl", "--text", stdin=failed.replace("bad a", "a") + "\n")
    assert done.exit_code == 0
    assert lines(done.stdout) == [{"text": "a", "embedding": [1.0, 97.0]}]
    assert lines(Path("out.jsonl").read_text())[1]["error"] == "the user's own"


def test_a_line_that_fails_fails_alone(call: Call, redis_url: str) -> None:
    given = ["a", "long text", "bb", "", "bad", "x" * 200_001, "c"]
    with played(redis_url, vectors, tasks=TASKS):
        done = call("embed", "-", "--text", stdin="\n".join(given) + "\n")
    found = lines(done.stdout)
    assert [line["text"] for line in found] == given
    assert [line.get("embedding") for line in found] == [[1, 97], None, [2, 98], None, None, None, [1, 99]]
    assert [line["error"]["code"] for line in found if "error" in line] == [
        "too_long",
        "invalid_request",
        "generation_failed",
        "invalid_request",
    ]
    assert [line["error"]["message"] for line in found[1:4:2]] == [
        "line 2 is too long",
        "line 4: the line is empty",
    ]
    assert "line 6: String should have at most 200000" in found[5]["error"]["message"]
    assert (done.exit_code, done.stderr) == (1, "4 of 7 lines failed: see their `error`\n")


def test_it_may_end_with_the_first_failure(call: Call, redis_url: str) -> None:
    given = [*["a"] * 40, "long", "b"]
    with played(redis_url, vectors, tasks=TASKS):
        done = call("embed", *given, "--fail-fast", "--output", "out.jsonl")
        assert done.exit_code == 2
        assert "40 lines are written to out.jsonl: --resume goes on after them" in done.stderr
        assert "error: line 41 is too long" in done.stderr
        # Told to, it goes on with the line that failed, and then with the others.
        again = call("embed", *given, "--resume", "--output", "out.jsonl")
    assert again.exit_code == 1
    found = lines(Path("out.jsonl").read_text())
    assert len(found) == 42
    assert [place for place, line in enumerate(found) if "error" in line] == [40]


def test_it_goes_on_where_it_ended(call: Call, redis_url: str, tmp_path: Path) -> None:
    texts = [f"{place % 10}" * (1 + place % 7) for place in range(100)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    with played(redis_url, vectors, tasks=TASKS) as asked:
        assert call("embed", "in.txt", "-o", "all.jsonl").exit_code == 0
        whole = (tmp_path / "all.jsonl").read_bytes()
        (tmp_path / "some.jsonl").write_bytes(whole[: len(whole) // 2])  # torn within a line
        asked.clear()
        assert call("embed", "in.txt", "-o", "some.jsonl", "--resume").exit_code == 0
        assert (tmp_path / "some.jsonl").read_bytes() == whole
        before = whole[: len(whole) // 2].count(b"\n")
        assert [text for request in asked for text in request.texts] == texts[before:]
        asked.clear()
        nothing = call("embed", "in.txt", "-o", "some.jsonl", "--resume")
        assert (nothing.exit_code, asked) == (0, [])
        assert nothing.stderr == "nothing is left to do: some.jsonl has an answer for every line\n"
        refused = call("embed", "in.txt", "-o", "some.jsonl")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "is there already" in refused.stderr


def test_lines_that_failed_are_tried_again(call: Call, redis_url: str, tmp_path: Path) -> None:
    texts = [f"{place}{'x' * (place % 9)}" for place in range(200)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    wrong = {0, 1, 31, 32, 100, 149}

    def half(request: Any) -> dict[str, Any]:
        if any(texts.index(text) in wrong for text in request.texts):
            raise GenerationFailed("not today")
        return vectors(request)

    with played(redis_url, vectors, tasks=TASKS):
        assert call("embed", "in.txt", "-o", "whole.jsonl", "--text").exit_code == 0
    arguments = ("embed", "in.txt", "-o", "out.jsonl", "--text", "--resume")
    with played(redis_url, half, tasks=TASKS):
        (tmp_path / "out.jsonl").write_text("")
        first = call(*arguments)
        assert first.exit_code == 1
        assert first.stderr.endswith(
            "6 of 200 lines failed: see their `error`, and --resume tries them again\n"
        )
        found = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
        (tmp_path / "out.jsonl").write_bytes(b"".join(found[:150]))  # ended before the rest
        assert call(*arguments).exit_code == 1
    with played(redis_url, vectors, tasks=TASKS) as asked:
        again = call(*arguments)
        assert (again.exit_code, again.stdout, again.stderr) == (0, "", "")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [texts.index(text) for request in asked for text in request.texts] == sorted(wrong)


def test_an_interrupted_run_says_how_far_it_is(redis_url: str, tmp_path: Path) -> None:
    env = environment(STREAMFLEET_REDIS_URL=redis_url, STREAMFLEET_QUEUE="q")
    output = tmp_path / "out.jsonl"
    reading, writing = os.pipe()
    with played(redis_url, vectors, tasks=TASKS):
        command = subprocess.Popen(
            [*PROGRAM, "embed", "-", "--output", str(output)],
            stdin=reading,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
        )
        try:
            os.close(reading)
            os.write(writing, b"a\nb\nc\n")  # and nothing more for now

            asyncio.run(
                eventually(
                    lambda: output.exists() and output.read_bytes().count(b"\n") == 3, patience_s=LIMIT_S
                )
            )
            command.send_signal(signal.SIGINT)
            _, said = command.communicate(timeout=LIMIT_S)
        finally:
            command.kill()
            command.wait()
            os.close(writing)
    assert command.returncode == 130
    assert said == f"3 lines are written to {output}: --resume goes on after them\n"


def test_a_full_queue_is_waited_for(call: Call, redis_url: str) -> None:
    with played(redis_url, vectors, tasks=TASKS, max_queue_depth=1):
        done = call("embed", *["a"] * 100)
    assert done.exit_code == 0
    assert len(lines(done.stdout)) == 100


def test_what_no_line_is_to_blame_for_ends_it(call: Call, redis_url: str) -> None:
    with played(redis_url, vectors, tasks=["classify"]):
        unsupported = call("embed", "a", "b", "--output", "out.jsonl")
        unknown = call("classify", "a", "--model", "other")
    assert (unsupported.exit_code, unsupported.stdout) == (2, "")
    assert unsupported.stderr.startswith("error: queue 'q' does classify, not embed")
    assert unknown.exit_code == 5
    assert call("embed", "a", "--queue", "nowhere").exit_code == 5
    assert (
        lines(call("embed", "a", "--queue", "nowhere", "--json").stderr)[0]["error"]["code"]
        == "model_not_found"
    )


def test_a_worker_that_answers_too_little_is_not_believed(call: Call, redis_url: str) -> None:
    with played(redis_url, lambda _: {"embeddings": (embedding(1.0),) * 2}, tasks=TASKS):
        done = call("embed", "a", "b", "c")
        one = call("embed", "a")
    assert (done.exit_code, one.exit_code) == (1, 1)
    assert [line["error"]["code"] for line in lines(done.stdout)] == ["incomplete_generation"] * 3
    assert lines(one.stdout)[0]["error"]["message"] == "the worker gave 2 answers where 1 were asked for"


def test_wrong_usage(call: Call) -> None:
    for arguments, fault in [
        (["embed"], "nothing was given"),
        (["embed", "nowhere.txt"], "there is no file"),
        (["embed", "a", "--resume"], "name it with --output"),
        (["embed", "."], "is a folder"),
        (["embed", ""], "the text is empty"),
        (["classify", "a", "-f", "x"], "give either --file"),
        (["rerank", "q", "-f", "x"], "x cannot be read"),
        (["call", "h", ""], "the input is no JSON; a text has quotes: '\"a text\"'"),
        (["call", "h", __file__], f"the input is no JSON but a file: it goes with --file {__file__}"),
        (["call", "h"], "either an input or --file"),
        (["call", "h", "1", "--file", "x"], "either an input or --file"),
        (["call", "h", "1", "--output", "x"], "go with --file"),
        (["call", "h", "not json"], "the input is no JSON"),
        (["call", "h", "NaN"], "the input is no JSON"),
        (["call", "h", "--file", "x", "--stream"], "--stream is for one input"),
        (["decide"], "either a file or --state"),
        (["decide", "x", "--state", "s"], "either a file or --state"),
        (["decide", "x", "--question", "a: b"], "go with --state"),
        (["decide", "--state", "s", "--question", "no id"], "has no id"),
        (["decide", "gone.json"], "cannot be read"),
    ]:
        done = call(*arguments)
        assert (done.exit_code, done.stdout) == (2, ""), arguments
        assert fault in done.stderr, arguments
        assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_ends_it_quietly(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\n" * 10_000)
    with played(redis_url, vectors, tasks=TASKS):
        done = subprocess.run(
            f"'{sys.executable}' -c \"$MAIN\" embed in.txt | head -n 1",
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            env=environment(STREAMFLEET_REDIS_URL=redis_url, STREAMFLEET_QUEUE="q", MAIN=PROGRAM[-1]),
            timeout=LIMIT_S,
            check=False,
        )
    assert (done.stdout, done.stderr) == (b'{"embedding": [1.0, 97.0]}\n', b"")


@pytest.mark.parametrize("where", [("-o", "/dev/full"), ()])
def test_a_full_disk_is_told_in_a_line(redis_url: str, tmp_path: Path, where: tuple[str, ...]) -> None:
    env = environment(STREAMFLEET_REDIS_URL=redis_url, STREAMFLEET_QUEUE="q")
    with played(redis_url, vectors, tasks=TASKS), Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "embed", "a", "b", *where],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            timeout=LIMIT_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


# --- classify


def labels(request: Any) -> dict[str, Any]:
    both = zip(request.texts, request.pairs or request.texts, strict=True)
    found = [(Label(label=first, score=0.75), Label(label=second, score=0.25)) for first, second in both]
    return {"classifications": tuple(Classification(labels=some[: request.top_k]) for some in found)}


def test_texts_get_labels(call: Call, redis_url: str) -> None:
    with played(redis_url, labels, tasks=TASKS) as asked:
        done = call("classify", "a", "b", "--top-k", "1", "--multi-label")
    assert lines(done.stdout) == [
        {"labels": [{"label": "a", "score": 0.75}]},
        {"labels": [{"label": "b", "score": 0.75}]},
    ]
    assert asked == [ClassifyRequest(texts=["a", "b"], top_k=1, multi_label=True)]


def test_pairs_come_in_json_lines(call: Call, redis_url: str) -> None:
    given = ['{"text": "a", "pair": "x", "id": 1}', '{"text": "b", "pair": "y"}', '{"text": "c", "pair": 5}']
    mixed = ['{"text": "a", "pair": "x"}', '{"text": "b"}']
    blank = ['{"text": "a", "pair": "x"}', '{"text": " ", "pair": "y"}', '{"text": "c", "pair": ""}']
    with played(redis_url, labels, tasks=TASKS) as asked:
        done = call("classify", "-", "--jsonl", stdin="\n".join(given))
        both = call("classify", "-", "--jsonl", stdin="\n".join(mixed))
        none = call("classify", "-", "--jsonl", stdin="\n".join(blank))
    first, second, third = lines(done.stdout)
    assert first == {"id": 1, "labels": [{"label": "a", "score": 0.75}, {"label": "x", "score": 0.25}]}
    assert [label["label"] for label in second["labels"]] == ["b", "y"]
    assert third["error"]["message"] == 'line 3: the field "pair" is no text'
    assert asked[0] == ClassifyRequest(texts=["a", "b"], pairs=["x", "y"])
    assert [[label["label"] for label in line["labels"]] for line in lines(both.stdout)] == [
        ["a", "x"],
        ["b", "b"],
    ]
    _, no_text, no_pair = lines(none.stdout)
    assert no_text["error"]["message"] == 'line 2: the field "text" is empty'
    assert "the pair of line 3 is empty" in no_pair["error"]["message"]


# --- rerank


def ranking(request: Any) -> dict[str, Any]:
    order = sorted(range(request.n), key=lambda place: -len(request.documents[place]))
    return {
        "ranking": tuple(
            Rank(index=place, score=len(request.documents[place]) / 8) for place in order[: request.top_n]
        )
    }


def test_documents_are_ranked_in_a_table(call: Call, redis_url: str) -> None:
    with played(redis_url, ranking, tasks=TASKS) as asked:
        done = call("rerank", "q", "-", "--raw-scores", stdin="a\n\nbbbb\tb\nccc\n")
    assert done.stdout.splitlines() == [
        "RANK   SCORE  DOCUMENT",
        "   1  0.7500  bbbb b",
        "   2  0.3750  ccc",
        "   3  0.1250  a",
    ]
    assert asked == [RerankRequest(query="q", documents=["a", "bbbb\tb", "ccc"], raw_scores=True)]


def test_ranks_as_json_count_the_lines_of_the_file(call: Call, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "a"}\n\n{"text": "bbb"}\n')
    with played(redis_url, ranking, tasks=TASKS):
        done = call("rerank", "q", "docs.jsonl", "--jsonl", "--json", "--top-n", "1")
        bad = call("rerank", "q", "-", "--jsonl", stdin='{"text": "a"}\n{}\n')
        none = call("rerank", "q", "-", stdin="\n")
    assert lines(done.stdout) == [{"index": 2, "score": 0.375, "document": "bbb"}]
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: line 2: ")
    assert none.stdout == "RANK  SCORE  DOCUMENT\n"


# --- decide


def decided(request: Any) -> dict[str, Any]:
    return {
        "answers": tuple(
            Decision(
                id=question.id,
                option=question.choices[0],
                probabilities=dict(zip(question.choices, (0.75, 0.25), strict=True)),
                scores=dict.fromkeys(question.choices, -1.0),
            )
            for question in request.questions
        )
    }


def test_questions_are_decided_in_a_table(call: Call, redis_url: str) -> None:
    with played(redis_url, decided, tasks=TASKS) as asked:
        done = call(
            *("decide", "--state", "-", "--question", "tone: What is it: calm?", "--question", "x:y"),
            *("--option", "calm", "--option", "very angry", "--truncate"),
            stdin="some text",
        )
        call("decide", "--state", "s", "--question", "a: Is it?", "--model", "m")
    assert done.stdout.splitlines() == [
        "QUESTION  ANSWER  SHARE  OTHERS",
        "tone      calm    0.750  very angry 0.250",
        "x         calm    0.750  very angry 0.250",
    ]
    options = ["calm", "very angry"]
    assert asked == [
        DecideRequest(
            state="some text",
            questions=[
                Question(id="tone", criteria="What is it: calm?", options=options),
                Question(id="x", criteria="y", options=options),
            ],
            truncate=True,
        ),
        DecideRequest(state="s", questions=[Question(id="a", criteria="Is it?", type="yes_no")], model="m"),
    ]


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_a_request_as_json(call: Call, redis_url: str, tmp_path: Path, how: str) -> None:
    document = json.dumps(
        {
            "messages": [{"role": "user", "content": "hello"}],
            "questions": [{"id": "q", "criteria": "c", "options": ["a", "b"]}],
            "temperatures": [[2, 0.5]],
        }
    )
    (tmp_path / "in.json").write_text(document)
    with played(redis_url, decided, tasks=TASKS) as asked:
        done = (
            call("decide", "in.json", "--json")
            if how == "file"
            else call("decide", "-", "--json", stdin=document)
        )
    assert lines(done.stdout) == [
        {"q": {"option": "a", "probabilities": {"a": 0.75, "b": 0.25}, "scores": {"a": -1.0, "b": -1.0}}}
    ]
    assert asked == [
        DecideRequest(
            messages=[ChatMessage(role="user", content="hello")],
            questions=[Question(id="q", criteria="c", options=["a", "b"])],
            temperatures={2: 0.5},
        )
    ]
    bad = call("decide", "-", stdin='{"state": "s", "questions": [{"id": ""}], "colour": 1}')
    assert bad.exit_code == 2
    assert "questions.0.id" in bad.stderr
    assert "colour: unknown field" in bad.stderr


# --- call

ANY: dict[str, Any] = {"model": "any", "tasks": ["call"]}


def echo(request: Any) -> dict[str, Any]:
    if request.input == "fail":
        raise GenerationFailed("it fails on this")
    return {"outputs": (request.input,)}


def test_a_handler_is_called(call: Call, redis_url: str) -> None:
    with played(redis_url, echo, **ANY) as asked:
        assert call("call", "any", '{"a": [1, "é"]}').stdout == '{"a": [1, "é"]}\n'
        assert call("call", "any", "-", stdin="null\n").stdout == "null\n"
        assert call("call", "any", "3", "--stream").stdout == "3\n"
        failed = call("call", "any", '"fail"')
        unknown = call("call", "ani", "1")
    assert asked[:3] == [CallRequest(handler="any", input=value) for value in ({"a": [1, "é"]}, None, 3)]
    assert (failed.exit_code, failed.stdout, failed.stderr) == (1, "", "error: it fails on this\n")
    assert unknown.exit_code == 5
    assert "does not serve handler 'ani' but any" in unknown.stderr


def test_an_input_that_does_not_fit_is_refused(call: Call, redis_url: str) -> None:
    card = HandlerCard(input_schema='{"type": "object", "required": ["text"]}')
    with played(redis_url, echo, handler=card, **ANY):
        done = call("call", "any", "{}")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "error: handler 'any' takes no such input: input: \"text\" is a required property\n"
    )


@pytest.mark.parametrize(
    ("schema", "hint"),
    [
        (
            '{"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}',
            """handler 'any' takes what looks like this: '{"text": "…"}'""",
        ),
        ('{"type": "string"}', """handler 'any' takes what looks like this: '"…"'"""),
        ("", """a text has quotes: '"a text"'"""),
    ],
)
def test_an_input_that_is_no_json_is_told_what_is_wanted(
    call: Call, redis_url: str, schema: str, hint: str
) -> None:
    with played(redis_url, echo, handler=HandlerCard(input_schema=schema), **ANY):
        done = call("call", "any", "What a lovely day")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: the input is no JSON; {hint}\n"


def test_a_handler_is_called_for_each_line(call: Call, redis_url: str, tmp_path: Path) -> None:
    values: list[Any] = [{"n": place} for place in range(100)]
    values[40] = "fail"
    given = [json.dumps(value) for value in values]
    given[70] = "no json"
    (tmp_path / "in.jsonl").write_text("\n".join(given))
    with played(redis_url, echo, **ANY):
        done = call("call", "any", "--file", "in.jsonl", "--output", "out.jsonl")
        piped = call("call", "any", "--file", "-", stdin="1\n2\n")
        blank = call("call", "any", "--file", "-", stdin="1\n\n2\n")
        gone = call("call", "any", "--file", "gone.jsonl")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "2 of 100 lines failed" in done.stderr
    found = lines((tmp_path / "out.jsonl").read_text())
    assert [place for place, line in enumerate(found) if "error" in line] == [40, 70]
    assert all(found[place] == {"output": values[place]} for place in range(100) if place not in (40, 70))
    assert found[40]["error"] == {"code": "generation_failed", "message": "it fails on this"}
    assert found[70]["error"] == {"code": "invalid_request", "message": "line 71: the line is no JSON"}
    assert lines(blank.stdout)[1]["error"]["message"] == "line 2: the line is empty"
    assert piped.stdout == '{"output": 1}\n{"output": 2}\n'
    assert (gone.exit_code, gone.stderr) == (
        2,
        "error: gone.jsonl cannot be read: No such file or directory\n",
    )


def test_parts_come_as_they_are_made(redis_url: str) -> None:
    async def stream() -> None:
        async with HandWorker(redis_url) as worker:
            await worker.announce(**ANY)
            env = environment(STREAMFLEET_REDIS_URL=redis_url, STREAMFLEET_QUEUE="q")
            with running("call", "any", "2", "--stream", env=env) as command:
                (work,) = await worker.take()
                await worker.emit(work, Parts(values=({"a": 1},)))
                await asyncio.to_thread(command.wait_for, '{"a": 1}')
                await worker.emit(work, Parts(values=(None,)))
                await worker.answer(work, outputs=({"a": 1}, None))
                assert await asyncio.to_thread(command.end) == (0, ['{"a": 1}', "null"])

    asyncio.run(stream())


# --- which queue


def test_the_only_queue_that_does_it_is_taken(
    call: Call, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STREAMFLEET_QUEUE")
    with (
        played(redis_url, vectors, "vectors", tasks=["embed"]),
        played(redis_url, echo, "here", **ANY),
        played(redis_url, echo, "there", model="other", tasks=["call"]),
    ):
        assert call("embed", "a").exit_code == 0
        assert call("call", "other", "1").stdout == "1\n"
        nobody = call("classify", "a")
        elsewhere = call("call", "other", "1", "--queue", "here")
        not_here = call("embed", "a", "--queue", "here")
        nowhere = call("rerank", "q", "a", "--queue", "here", "--json")
        with played(redis_url, vectors, "more", tasks=["embed"]):
            two = call("embed", "a")
    assert (nobody.exit_code, two.exit_code) == (2, 2)
    assert nobody.stderr.endswith("choose one with --queue (here, there, vectors)\n")
    assert two.stderr.endswith("choose one with --queue (more, vectors)\n")
    assert elsewhere.exit_code == 5
    assert elsewhere.stderr.endswith(f"(asked at {redis_url}; queue 'there' does it)\n")
    assert not_here.exit_code == 2
    assert not_here.stderr.startswith("error: queue 'here' does call, not embed: ")
    assert not_here.stderr.endswith(f"(asked at {redis_url}; queue 'vectors' does it)\n")
    (error,) = (line["error"] for line in lines(nowhere.stderr))
    assert error["message"].endswith(f"(asked at {redis_url})")
    assert error["details"]["feature"] == "rerank"


# --- result


def test_the_results_of_submitted_requests(call: Call, redis_url: str) -> None:
    requests: list[Any] = [
        EmbedRequest(texts=["ab", "c"]),
        ClassifyRequest(texts=["a"]),
        RerankRequest(query="q", documents=["a", "bb"]),
        CallRequest(handler="m", input={"a": 1}),
    ]
    answer = {"embed": vectors, "classify": labels, "rerank": ranking, "call": echo}

    async def submit() -> list[str]:
        async with Client(redis_url, "q") as fleet:
            return [(await fleet.submit(request)).id for request in requests]

    with played(redis_url, lambda request: answer[request.kind](request), tasks=[*TASKS, "call"]):
        rids = asyncio.run(submit())
        shown = [call("result", rid, "--timeout", "20").stdout for rid in rids]
        documents = [json.loads(call("result", rid, "--json").stdout) for rid in rids]
    assert [lines(text) for text in shown] == [
        [[2.0, 97.0], [1.0, 99.0]],
        [{"labels": [{"label": "a", "score": 0.75}, {"label": "a", "score": 0.25}]}],
        [{"index": 1, "score": 0.25}, {"index": 0, "score": 0.125}],
        [{"a": 1}],
    ]
    assert documents[0]["embeddings"] == [[2.0, 97.0], [1.0, 99.0]]
    assert documents[3]["outputs"] == [{"a": 1}]
    assert all(document["state"] == "done" for document in documents)


# --- help


def test_help_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("embed", "classify", "rerank", "decide", "call", "worker"):
        said = CliRunner().invoke(app, [name, "--help"]).stdout
        assert max(map(len, said.splitlines())) <= 80
        assert "124 deadline passed" in " ".join(said.split())
    listed = CliRunner().invoke(app, ["--help"]).stdout
    for name in ("embed", "classify", "rerank", "decide", "call"):
        assert f"\n  {name} " in listed
    assert "..." not in listed.partition("Commands:")[2]
