"""The commands that a service's scripts call, on a real server: what they print, and how they exit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from command import LIMIT_S, PROGRAM, environment, running, streamfleet
from hand_worker import HandWorker
from streamfleet_common.schemas import Envelope, GenerateRequest, Guide, Sampling
from streamfleet_producer import cli
from streamfleet_producer.cli import options
from streamfleet_producer.cli.app import app
from streamfleet_producer.cli.workers import COMMAND
from streamfleet_producer.client import Client
from streamfleet_worker.settings import WorkerSettings

Call = Callable[..., Result]
NOBODY = "00" + "f" * 32


@pytest.fixture
def call(fleet_url: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command in this process, on the fleet."""
    monkeypatch.setenv("STREAMFLEET_REDIS_URL", fleet_url)
    monkeypatch.delenv("STREAMFLEET_QUEUE", raising=False)

    def call(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, arguments, input=stdin)

    return call


@pytest.fixture
def tiny(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command on a queue that takes one request, and has a worker by its card only."""
    monkeypatch.setenv("STREAMFLEET_REDIS_URL", redis_url)
    monkeypatch.setenv("STREAMFLEET_QUEUE", "tiny")

    async def announce() -> None:
        async with HandWorker(redis_url, "tiny") as worker:
            await worker.announce(max_queue_depth=1)

    asyncio.run(announce())
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_stream_prints_the_text_alone(call: Call) -> None:
    done = call("stream", "ECHO 5", "--queue", "smollm2")

    assert (done.exit_code, done.stdout, done.stderr) == (0, "tok0 tok1 tok2 tok3 tok4\n", "")


def test_the_only_queue_needs_no_name(call: Call) -> None:
    assert call("stream", "ECHO 2").stdout == "tok0 tok1\n"


@pytest.mark.parametrize("how", ["--chat", "--raw"])
def test_chat_and_raw_reach_the_worker(call: Call, how: str) -> None:
    assert call("stream", "hello", how).stdout == "hello\n"


def test_a_prompt_comes_from_stdin(call: Call) -> None:
    assert call("stream", "-", stdin="ECHO 2\n").stdout == "tok0 tok1\n"


def test_stop_and_max_tokens_end_the_text(call: Call) -> None:
    assert call("stream", "ECHO 9", "--stop", " tok3", "--stop", " tok5").stdout == "tok0 tok1 tok2\n"
    assert call("stream", "ECHO 9", "--max-tokens", "2").stdout == "tok0 tok1\n"


def test_several_answers_come_below_their_numbers(call: Call) -> None:
    done = call("stream", "ECHO 2", "-n", "3")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "[1]\ntok0#0 tok1#0\n\n[2]\ntok0#1 tok1#1\n\n[3]\ntok0#2 tok1#2\n"
    rid = call("submit", "ECHO 2", "--n", "3").stdout.strip()
    assert call("result", rid).stdout == done.stdout


def test_as_long_as_it_fits(call: Call) -> None:
    done = call("stream", "ECHO 5000", "--max-tokens", "fit")
    assert len(done.stdout.split()) == 4096 - 2
    assert call("stream", "ECHO 5000", "--max-tokens", "fits").exit_code == 2


def test_a_long_prompt_is_cut_if_it_may_be(call: Call) -> None:
    assert call("stream", "a " * 4000).exit_code == 2
    assert call("stream", "a " * 4000, "--truncate", "10").exit_code == 0


def test_the_prompt_is_shown_on_request(call: Call) -> None:
    assert call("stream", "ECHO 2", "--echo").stdout == "ECHO 2tok0 tok1\n"


def test_log_probabilities_are_among_the_json(call: Call) -> None:
    *_, end = [
        json.loads(line)
        for line in call("stream", "ECHO 1", "--json", "--top-logprobs", "2").stdout.splitlines()
    ]
    (choice,) = end["choices"]
    assert (choice["logprobs"], choice["top_logprobs"]) == ([-0.125], [[[0, -0.125], [1, -1.125]]])


def test_stream_as_json_is_an_event_a_line(call: Call) -> None:
    done = call("stream", "ECHO 3", "--json")

    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [events[0]["type"], events[1]["type"], events[-1]["type"]] == ["start", "delta", "end"]
    assert events[-1]["choices"][0]["text"] == "tok0 tok1 tok2"
    assert events[-1]["usage"]["completion_tokens"] == 3


def test_a_request_s_life_by_its_id(call: Call) -> None:
    rid = call("submit", "ECHO 4", "--lane", "high").stdout.strip()

    assert call("result", rid).stdout == "tok0 tok1 tok2 tok3\n"
    assert json.loads(call("result", rid, "--json").stdout)["choices"][0]["finish_reason"] == "eos"
    status = json.loads(call("status", rid, "--json").stdout)
    assert status["state"] == "done"
    shown = f"state     done\nqueue     smollm2\nworker    {status['worker']}\nattempt   1\naccepted  "
    assert status["worker"]
    assert call("status", rid).stdout.startswith(shown)
    assert call("cancel", rid).stdout == "done\n"
    assert json.loads(call("cancel", rid, "--json").stdout) == {"id": rid, "state": "done"}


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-"])
def test_a_request_s_id_as_a_gateway_shows_it(call: Call, prefix: str) -> None:
    shown = f"{prefix}smollm2:{call('submit', 'ECHO 2').stdout.strip()}"

    assert call("result", shown).stdout == "tok0 tok1\n"
    assert json.loads(call("status", shown, "--json").stdout)["state"] == "done"
    assert call("cancel", shown).stdout == "done\n"
    assert call("explain", shown).stdout.startswith(
        f"request   {shown.rpartition(':')[2]} of queue smollm2\n"
    )


def test_a_key_used_twice_is_one_request(call: Call) -> None:
    tickets = [
        json.loads(call("submit", "ECHO 1", "--idempotency-key", "order-17", "--json").stdout)
        for _ in range(2)
    ]

    assert tickets[0]["id"] == tickets[1]["id"]
    assert [ticket["duplicate"] for ticket in tickets] == [False, True]
    other = call("submit", "ECHO 2", "--idempotency-key", "order-17")
    assert other.exit_code == 2
    assert other.stderr.startswith("error: ")


def test_queues_are_listed_with_who_serves_them(call: Call, fleet_url: str) -> None:
    lines = call("queues").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["QUEUE", "QUEUED", "RUNNING", "LIMIT", "DEAD", "WORKERS", "DRAINING", "STATE", "MODEL"],
        ["smollm2", "0", "0", "1024", "0", "1", "0", "open", "scripted"],
    ]
    (row,) = json.loads(call("queues", "--json").stdout)
    assert row == {
        "queue": "smollm2",
        "queued": 0,
        "running": 0,
        "limit": 1024,
        "dead": 0,
        "workers": 1,
        "draining": 0,
        "state": "open",
        "models": ["scripted"],
    }


def test_no_queues_yet(redis_url: str) -> None:
    done = CliRunner().invoke(app, ["queues", "--redis-url", redis_url])

    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("no queues yet")
    assert CliRunner().invoke(app, ["stream", "hello", "--redis-url", redis_url]).exit_code == 5


def test_a_password_in_the_url_is_never_shown(redis_url: str) -> None:
    url = redis_url.replace("redis://", "redis://default:s3cret@")  # this user takes any
    done = CliRunner().invoke(app, ["stream", "hello", "--redis-url", url])

    assert done.exit_code == 5
    assert "default:***@" in done.stderr
    assert "s3cret" not in done.output


def test_several_queues_want_a_choice(redis_url: str) -> None:
    async def announce() -> None:
        for name in ("one", "two"):
            async with HandWorker(redis_url, name) as worker:
                await worker.announce()

    asyncio.run(announce())
    for command, why in (
        (["stream", "hello"], ", and 2 of the 2 looked at do this now"),
        (["call", "h", "1"], ", and none of the 2 looked at does this now"),
        (["status", NOBODY], ""),
    ):
        done = CliRunner().invoke(app, [*command, "--redis-url", redis_url])

        assert done.exit_code == 2
        assert done.stderr == f"error: there are several queues{why}: choose one with --queue (one, two)\n"


def test_the_only_queue_that_does_what_is_asked_is_found_among_many(redis_url: str) -> None:
    """Names of queues whose workers are gone for ever are kept."""

    async def announce() -> None:
        async with HandWorker(redis_url, "p50-alive") as worker:
            await worker.announce(tasks=("embed",))

    raw = redis.Redis.from_url(redis_url)
    raw.hset("streamfleet:queues", mapping={f"p{number:02}": "1" for number in range(60)})
    raw.close()
    asyncio.run(announce())

    async def opened() -> str:
        async with options.open_client(redis_url, None, kind="embed") as client:
            return client.queue

    assert asyncio.run(opened()) == "p50-alive"
    done = CliRunner().invoke(app, ["stream", "hello", "--redis-url", redis_url])
    assert "and none of the 61 looked at does this now" in done.stderr
    assert "p09 and 51 more)" in done.stderr


@pytest.mark.parametrize("command", [("stream", "hello"), ("dead", "list")])
def test_of_very_many_queues_some_are_named(redis_url: str, command: tuple[str, ...]) -> None:
    with redis.Redis.from_url(redis_url) as raw:
        raw.hset("streamfleet:queues", mapping={f"queue{number:04}": "1" for number in range(1203)})
    done = CliRunner().invoke(app, [*command, "--redis-url", redis_url])

    assert done.exit_code == 2
    assert "queue0009 and 1,193 more)" in done.stderr
    assert "queue0010" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("stream", "hello", "--queue", "nope"), 5, "no queue 'nope'; there are: smollm2"),
        (("stream", "hello", "--queue", "no pe"), 2, "queue: "),
        (("stream", " "), 2, "the prompt is empty"),
        (("stream", "hello", "--temperature", "-1"), 2, "temperature: "),
        (("stream", "hello", "--max-tokens", "30000"), 2, "over the limit of 4096 tokens"),
        (("stream", "hello", "--min-tokens", "200"), 2, "min_tokens (200) is above max_tokens (128)"),
        (("stream", "hello", "--n", "65"), 2, "n: "),
        (("stream", "hello", "--regex", "a+"), 2, "knows no guides"),
        (("stream", "hello", "--regex", "a+", "--choice", "a"), 2, "give exactly one of json_schema, regex"),
        (("stream", "hello", "--json-schema", __file__), 2, "json_schema: a JSON document is wanted"),
        (("result", NOBODY), 5, "no such request"),
        (("status", "what"), 2, "an id has 34 hex digits"),
        (("status", f"cmpl-smollm2:{NOBODY}"), 5, "no such request"),
        (
            ("result", f"other:{NOBODY}", "--queue", "smollm2"),
            2,
            "is of queue 'other', but 'smollm2' was named",
        ),
        (("cancel", NOBODY), 5, "no such request"),
        (("queues", "--redis-url", "http://here"), 4, "'http://here' is no Redis URL"),
        (("up", "--redis-url", "redis://here", "--port", "1"), 2, "--redis-url"),
        (("up", "--handler", "a:b", "--model", "m"), 2, "either a model or a handler"),
    ],
)
def test_a_refusal_is_one_line_and_a_status(
    call: Call, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = call(*arguments)

    assert (done.exit_code, done.stdout) == (status, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_refusal_as_json_has_its_parts(call: Call) -> None:
    done = call("stream", "hello", "--queue", "nope", "--json")

    assert (done.exit_code, done.stdout) == (5, "")
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "model_not_found"
    assert error["details"] == {"known": ["smollm2"]}


def test_wrong_usage_is_status_2(call: Call) -> None:
    assert call("stream").exit_code == 2
    assert call("stream", "hello", "--lane", "fast").exit_code == 2
    assert call("nonsense").exit_code == 2


def test_a_full_queue_is_status_3(tiny: Call) -> None:
    assert tiny("submit", "hello").exit_code == 0
    done = tiny("submit", "hello")

    assert done.exit_code == 3
    assert done.stderr.startswith("error: ")


def test_a_deadline_is_status_124(tiny: Call) -> None:
    rid = tiny("submit", "hello").stdout.strip()

    assert tiny("result", rid, "--timeout", "0").exit_code == 124
    assert tiny("cancel", rid).stdout == "cancelled\n"
    assert tiny("result", rid).exit_code == 1


@pytest.mark.parametrize("guided", [True, False])
def test_every_option_reaches_the_worker(tiny: Call, redis_url: str, tmp_path: Path, guided: bool) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    said = tiny(
        *("submit", "hello", "--raw", "--max-tokens", "9", "-n", "3", "--stop", "."),
        *("--truncate", "7", "--echo", "--logprobs", "--top-logprobs", "4"),
        *("--temperature", "0.5", "--top-k", "6", "--top-p", "0.75", "--min-p", "0.125", "--seed", "8"),
        *("--typical-p", "0.875"),
        *("--repetition-penalty", "1.5", "--presence-penalty", "0.25", "--frequency-penalty", "-0.25"),
        *(("--json-schema", str(schema)) if guided else ("--ignore-eos", "--min-tokens", "2")),
    )
    assert (said.exit_code, said.stderr) == (0, "")

    async def take() -> GenerateRequest:
        async with HandWorker(redis_url, "tiny") as worker:
            (work,) = await worker.take()
            assert isinstance(work.envelope.request, GenerateRequest)
            return work.envelope.request

    assert asyncio.run(take()) == GenerateRequest(
        prompt="hello",
        max_tokens=9,
        min_tokens=0 if guided else 2,
        n=3,
        stop=(".",),
        ignore_eos=not guided,
        truncate=7,
        echo=True,
        logprobs=True,
        top_logprobs=4,
        sampling=Sampling(
            temperature=0.5,
            top_k=6,
            top_p=0.75,
            min_p=0.125,
            typical_p=0.875,
            seed=8,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.25,
        ),
        guide=Guide(json_schema='{"type": "object"}') if guided else None,
    )


def test_nothing_said_is_the_default_request(tiny: Call, redis_url: str) -> None:
    assert tiny("submit", "hello", "--raw").exit_code == 0

    async def take() -> Envelope:
        async with HandWorker(redis_url, "tiny") as worker:
            (work,) = await worker.take()
            return work.envelope

    assert asyncio.run(take()).request == GenerateRequest(prompt="hello")


def test_ctrl_c_cancels_the_request(tiny: Call, redis_url: str) -> None:
    async def depth() -> int:
        async with Client(redis_url, "tiny") as client:
            return (await client.depth()).open

    env = environment(STREAMFLEET_REDIS_URL=redis_url, STREAMFLEET_QUEUE="tiny")
    with running("stream", "hello", env=env) as stream:
        while asyncio.run(depth()) == 0:
            assert stream.process.poll() is None, stream.end()
        os.killpg(stream.process.pid, signal.SIGINT)

        assert stream.end() == (130, [])
    assert asyncio.run(depth()) == 0


def test_waiting_without_a_worker_is_said(redis_url: str) -> None:
    async def announce(life_ms: int) -> None:
        async with HandWorker(redis_url, "tiny") as worker:
            await worker.announce(life_ms=life_ms)

    asyncio.run(announce(60_000))
    asyncio.run(announce(0))
    env = environment(STREAMFLEET_REDIS_URL=redis_url)
    with running("stream", "hello", env=env) as stream:
        stream.wait_for("waiting: no worker serves queue 'tiny' now; start one, or end with Ctrl-C")
        os.killpg(stream.process.pid, signal.SIGTERM)

        assert stream.end()[0] == 143


@pytest.mark.parametrize("command", [["stream", "ECHO 3"], ["queues"]], ids=["stream", "queues"])
def test_a_reader_that_leaves_ends_it_quietly(fleet_url: str, command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PROGRAM, *command],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=environment(STREAMFLEET_REDIS_URL=fleet_url),
        timeout=LIMIT_S,
        check=False,
    )
    os.close(writing)

    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_no_redis_is_status_4() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
        done = streamfleet("stream", "hello", "--queue", "q", "--redis-url", url)

    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(f"error: Redis at {url} cannot be reached ")
    assert "`streamfleet up` starts one here" in done.stderr
    assert done.stderr.count("\n") == 1


def test_errors_are_red_on_a_terminal_unless_it_wants_no_colour() -> None:
    arguments = ("queues", "--redis-url", "http://here")

    coloured = streamfleet(*arguments, env=environment(FORCE_COLOR="1", TERM="xterm-256color"))
    plain = streamfleet(*arguments, env=environment(FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1"))

    assert coloured.stderr.startswith("\x1b[1;31merror: ")
    assert "31m" not in plain.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import streamfleet_producer.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: the streamfleet command needs the Python package '{missing}': "
        "pip install 'streamfleet[cli]'\n"
    )


def test_ctrl_c_before_there_is_a_command_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def importing() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", importing)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130


def test_the_command_imports_neither_a_worker_nor_torch() -> None:
    program = (
        "import sys, streamfleet_producer.cli.app; "
        "print([name for name in ('torch', 'streamfleet_worker') if name in sys.modules])"
    )

    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


def test_help_has_the_options_in_groups_and_fits_a_terminal() -> None:
    for command in ("stream", "submit"):
        lines = streamfleet(command, "--help", env=environment(COLUMNS="80")).stdout.splitlines()
        titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
        assert titles == [
            "Arguments:",
            "The answer:",
            "How it is drawn:",
            "Its form (one of them):",
            "Options:",
        ]
        assert max(map(len, lines)) <= 80
        listed = [line.split()[0] for line in lines if line.startswith("  --")]
        assert len(listed) == len(set(listed)) >= 25


def test_help_names_every_command_and_status() -> None:
    said = CliRunner().invoke(app, ["--help"]).stdout
    for name in ("demo", "up", "worker", "stream", "submit", "result", "status", "cancel", "queues"):
        assert f"\n  {name} " in said
        own = CliRunner().invoke(app, [name, "--help"])
        assert own.exit_code == 0
        assert "124 deadline passed" in " ".join(own.stdout.split())
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("streamfleet ")


def test_worker_hands_its_options_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: executed.append(arguments))
    monkeypatch.setenv("STREAMFLEET_QUEUE", "from-outside")
    given = {
        "model": "smollm2", "engine": "scripted", "device": "cpu", "precision": "float32", "threads": "2",
        "max_batch_size": "4", "max_delay_ms": "5.0", "max_seq_len": "512", "max_queue_depth": "9",
        "redis_url": "redis://there", "http_port": "0", "drain_timeout_s": "3.0",
        "handler": "module:function", "models_file": "models.toml",
    }  # fmt: skip

    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert CliRunner().invoke(app, ["worker", *options]).exit_code == 0

    ((program, arguments, env),) = executed
    assert (program, arguments) == (sys.executable, COMMAND)
    assert {name: env[f"STREAMFLEET_{name.upper()}"] for name in given} == given
    assert env["STREAMFLEET_QUEUE"] == "from-outside"
    assert set(given) <= set(WorkerSettings.model_fields)
