"""`streamfleet up`, with the scripted engine: a fleet on one machine, asked by other processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from command import LIMIT_S, Running, descendants, environment, running, streamfleet, wait_gone
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer.cli import up


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def curl(line: str) -> tuple[int, str]:
    """Do what a curl line says; gives the status and the body."""
    arguments = shlex.split(line)
    assert arguments[0] == "curl"
    options = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    headers = dict(value.split(": ", 1) for name, value in options.items() if name == "-H")
    asked = urllib.request.Request(arguments[1], options["-d"].encode(), headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            asked, timeout=LIMIT_S
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def gateway_of(fleet: Running) -> int:
    (gateway,) = (pid for pid, args in descendants(fleet.process.pid).items() if args.endswith(".gateway"))
    return gateway


def workers_of(fleet: Running) -> dict[int, str]:
    family = descendants(fleet.process.pid)
    (supervisor,) = (
        pid
        for pid, args in family.items()
        if args.endswith("streamfleet_worker") and len(descendants(pid)) > 0
    )
    return descendants(supervisor)


def test_a_fleet_is_asked_mended_and_ended() -> None:
    port = free_port()
    env = environment(STREAMFLEET_REDIS_URL=f"redis://localhost:{port}/0")
    with running("up", "--workers", "2", "--port", port, "--no-gateway") as fleet:
        scraped = fleet.wait_for("metrics").split()[-1]
        fleet.wait_for("Ready. Point a client at")
        assert fleet.wait_for("url").split()[-1] == f"redis://localhost:{port}/0"
        assert fleet.wait_for("queue").split()[-1] == "smollm2"
        ready_to_copy = fleet.wait_for("streamfleet stream")
        assert ready_to_copy == (
            '  streamfleet stream "What is the capital of France?" --queue smollm2 '
            f"--redis-url redis://localhost:{port}/0"
        )
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", scraped)

        answer = streamfleet("stream", "ECHO 3", "--queue", "smollm2", env=env)
        assert (answer.returncode, answer.stdout) == (0, "tok0 tok1 tok2\n")
        assert json.loads(streamfleet("queues", "--json", env=env).stdout)[0]["workers"] == 2

        victim, _ = sorted(workers_of(fleet))
        os.kill(victim, signal.SIGKILL)
        line = fleet.wait_for("ended: it was killed by signal 9; another starts in 1 s")
        number = line.split()[1]
        fleet.wait_for(f"worker {number}  scripted")
        processes = descendants(fleet.process.pid)
        assert len(workers_of(fleet)) == 2

        os.killpg(fleet.process.pid, signal.SIGINT)
        status, said = fleet.end()

        assert status == 0
        assert said[-1].startswith("ending: the workers finish what they run")
        wait_gone(processes)


@pytest.mark.slow  # several starts of everything
def test_the_broker_comes_back_with_its_data(tmp_path: Path) -> None:
    port = free_port()
    env = environment(STREAMFLEET_REDIS_URL=f"redis://localhost:{port}/0")
    with running("up", "--port", port, "--data", str(tmp_path), "--no-gateway") as fleet:
        fleet.wait_for("Ready.")
        rid = streamfleet("submit", "ECHO 2", env=env).stdout.strip()
        assert streamfleet("result", rid, env=env).stdout == "tok0 tok1\n"
        (server,) = (
            pid for pid, args in descendants(fleet.process.pid).items() if "valkey-server" in args.split()[0]
        )
        os.kill(server, signal.SIGTERM)
        fleet.wait_for("broker    ended; starting it again")
        fleet.wait_for("broker    is back")
        assert streamfleet("stream", "ECHO 1", env=env).stdout == "tok0\n"
        assert streamfleet("result", rid, env=env).stdout == "tok0 tok1\n"
        os.kill(fleet.process.pid, signal.SIGTERM)
        assert fleet.end()[0] == 0

    assert (tmp_path / "appendonlydir").is_dir()


def test_killed_it_takes_all_along() -> None:
    with running("up", "--port", free_port(), "--http-port", free_port()) as fleet:
        fleet.wait_for("Ready.")
        processes = descendants(fleet.process.pid)
        assert gateway_of(fleet) in processes
        fleet.process.kill()

        assert fleet.end()[0] == -signal.SIGKILL
        wait_gone(processes)


def test_its_gateway_is_asked_mended_and_ended(tmp_path: Path) -> None:
    http_port = free_port()
    home = f"http://localhost:{http_port}"
    with running("up", "--port", free_port(), "--http-port", http_port) as fleet:
        assert fleet.wait_for("openai").split()[-1] == f"{home}/v1"
        assert fleet.wait_for("page").split()[-1] == home
        line = fleet.wait_for("curl")
        status, body = curl(line)
        # What the scripted engine says to a prompt that is no command.
        assert json.loads(body)["choices"][0]["message"]["content"] == "What is the capital of France?"
        assert status == 200

        os.kill(gateway_of(fleet), signal.SIGKILL)
        fleet.wait_for("gateway   ended: it was killed by signal 9; it starts again in 1 s")
        fleet.wait_for("gateway   is back")
        assert curl(line)[0] == 200
        processes = descendants(fleet.process.pid)

        os.killpg(fleet.process.pid, signal.SIGINT)
        status, said = fleet.end()

        assert status == 0
        assert said[-1].startswith("ending: the workers finish what they run")
        wait_gone(processes)


@pytest.mark.slow
def test_a_gateway_that_cannot_start_is_the_end() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = streamfleet("up", "--port", free_port(), "--http-port", port)

    assert done.returncode == 1
    assert done.stderr == (
        "error: the gateway ended while starting: "
        f"cannot listen on 127.0.0.1:{port} (Address already in use): "
        "choose another STREAMFLEET_GATEWAY_PORT or STREAMFLEET_GATEWAY_HOST\n"
    )
    assert "Address" not in done.stdout


@pytest.mark.slow  # several starts of everything
def test_where_keys_are_wanted_it_says_so(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = streamfleet("keys", "add", "acme", "--keys-file", str(keys)).stdout.strip()
    env = environment(STREAMFLEET_KEYS_FILE=str(keys))
    with running("up", "--port", free_port(), "--http-port", free_port(), env=env) as fleet:
        line = fleet.wait_for("curl")
        assert curl(line)[0] == 401
        assert curl(line.replace("KEY", key))[0] == 200

        keys.write_text("{")
        with ThreadPoolExecutor(1) as aside:
            heard = aside.submit(fleet.wait_for, "gateway  │ error    key file not taken")
            # The file is looked at when somebody asks, once a second; the keys of before go on.
            while not heard.done():
                assert curl(line.replace("KEY", key))[0] == 200
            assert "keys.json" in heard.result()


@pytest.mark.slow
def test_without_the_extra_it_goes_on_without_a_gateway(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['uvicorn'] = None\n")
    env = environment(PYTHONPATH=str(tmp_path))
    words = "the HTTP gateway needs the Python package uvicorn: pip install 'streamfleet[gateway]'"
    with running("up", "--port", free_port(), env=env) as fleet:
        fleet.wait_for(f"gateway   left out: {words}")
        fleet.wait_for("Ready.")
        fleet.wait_for("Ctrl-C ends all.")
        assert not any(" openai " in line or " page " in line for line in fleet.said)
    alone = streamfleet("gateway", env=env)
    assert (alone.returncode, alone.stderr) == (2, f"error: {words}\n")


@pytest.mark.slow  # several starts of everything
def test_another_s_server_is_used_and_left_alone(redis_url: str) -> None:
    with running("up", "--redis-url", redis_url, "--queue", "mine", "--no-gateway") as fleet:
        fleet.wait_for("not started here")
        fleet.wait_for("Ready.")
        assert streamfleet("stream", "ECHO 1", "--redis-url", redis_url).stdout == "tok0\n"
        os.kill(fleet.process.pid, signal.SIGTERM)

        assert fleet.end()[0] == 0
    assert json.loads(streamfleet("queues", "--json", "--redis-url", redis_url).stdout)[0]["workers"] == 0


def test_an_unreachable_server_is_status_4() -> None:
    done = streamfleet("up", "--redis-url", f"redis://127.0.0.1:{free_port()}/0")

    assert done.returncode == 4
    assert done.stderr.startswith("error: Redis at ")


def test_a_port_that_was_asked_for_and_is_taken(server: EmbeddedBroker) -> None:
    done = streamfleet("up", "--port", server.url.rpartition(":")[2].removesuffix("/0"))

    assert done.returncode == 4
    assert "is taken: stop what listens there or choose another port" in done.stderr


def test_by_default_it_takes_the_next_free_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        assert up._free_port(port, "--port") > port


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_the_end() -> None:
    done = streamfleet("up", "--port", free_port(), env=environment(STREAMFLEET_MAX_BATCH_SIZE="0"))

    assert done.returncode == 1
    assert done.stderr.startswith("error: the worker ended while starting: settings are not valid: ")
    assert done.stderr.count("\n") == 1
    assert "not valid" not in done.stdout


def test_a_handler_that_cannot_be_loaded_says_why_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('no such weights')\n")
    env = environment(STREAMFLEET_ENGINE="auto", PYTHONPATH=str(tmp_path))
    done = streamfleet("up", "--port", free_port(), "--handler", "mine:f", env=env)

    assert done.returncode == 1
    assert done.stderr.startswith("error: the worker ended while starting: ")
    assert (done.stdout + done.stderr).count("no such weights") == 1, done
    assert "another starts" not in done.stdout


def test_a_handler_is_shown_how_to_be_called_and_is_heard(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pydantic import BaseModel\n"
        "from streamfleet_worker import handler\n"
        "class Input(BaseModel):\n"
        "    text: str\n"
        "    times: int\n"
        "    mood: str = 'calm'\n"
        "@handler('shout')\n"
        "def shout(batch: list[Input]) -> list[str]:\n"
        "    print('called with', len(batch))\n"
        "    return [item.text * item.times for item in batch]\n"
    )
    port = free_port()
    env = environment(STREAMFLEET_ENGINE="auto", PYTHONPATH=str(tmp_path))
    given = ("--port", port, "--http-port", free_port(), "--handler", "mine:shout")
    with running("up", *given, env=env) as fleet:
        hint = shlex.split(fleet.wait_for("streamfleet call"))
        assert hint[1:4] == ["call", "shout", '{"text": "…", "times": 1}']
        answer = streamfleet(*hint[1:])
        assert (answer.returncode, answer.stdout) == (0, '"…"\n')
        assert curl(fleet.wait_for("curl")) == (200, '"…"')
        fleet.wait_for("worker 1 │ called with 1")
        os.killpg(fleet.process.pid, signal.SIGINT)
        assert fleet.end()[0] == 0


@pytest.mark.slow  # imports torch
def test_a_model_that_is_not_there_is_the_end() -> None:
    pytest.importorskip("torch")
    env = environment(STREAMFLEET_ENGINE="generation")
    done = streamfleet("up", "--port", free_port(), "--model", "/no/such/model", env=env)

    assert done.returncode == 1
    assert done.stderr.startswith("error: the worker ended while starting: ")
    assert "/no/such/model" in done.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("model", "queue"),
    [
        ("smollm2", "smollm2"),
        ("org/Name-1.5@main", "Name-1.5"),
        ("/models/My Model/", "My-Model"),
        ("./x.Q4_1.gguf", "x.Q4_1"),
        ("///", "default"),
    ],
)
def test_a_queue_is_named_after_its_model(model: str, queue: str) -> None:
    assert up.queue_of(model) == queue
