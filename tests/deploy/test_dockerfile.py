"""The image's recipe, checked without a container engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.gateway.settings import GatewaySettings

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
HADOLINT = Path(sys.executable).parent / "hadolint"


def lint(text: str) -> list[str]:
    """The rules that hadolint finds broken."""
    command = [str(HADOLINT), "--format", "json", "-"]
    answer = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return [finding["code"] for finding in json.loads(answer.stdout)]


def instructions(stage: str) -> list[tuple[str, str]]:
    """The instructions of one stage, in order, each on one line and without comments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    found: list[tuple[str, str]] = []
    current = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            current = rest.split(" AS ")[1]
        if name and current == stage:
            found.append((name, re.sub(r"\s+", " ", rest)))
    return found


def only(stage: str, name: str) -> str:
    (found,) = [rest for instruction, rest in instructions(stage) if instruction == name]
    return found


def environment(stage: str) -> dict[str, str]:
    pairs = [pair for name, rest in instructions(stage) if name == "ENV" for pair in rest.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def test_the_linter_finds_nothing() -> None:
    assert lint(DOCKERFILE.read_text()) == []


@pytest.mark.parametrize(
    ("line", "planted", "rule"),
    [
        ("WORKDIR /src", "WORKDIR src", "DL3000"),
        ("ARG PYTHON_IMAGE=python:3.12-slim-bookworm", "FROM python AS x", "DL3006"),
        ('ENTRYPOINT ["streamfleet"]', "ENTRYPOINT streamfleet", "DL3025"),
        ("USER 10001:10001", "USER root", "DL3002"),
    ],
)
def test_the_linter_finds_a_planted_error(line: str, planted: str, rule: str) -> None:
    text = DOCKERFILE.read_text()
    assert line in text

    assert rule in lint(text.replace(line, planted))


@pytest.mark.parametrize("stage", ["producer", "worker"])
def test_nothing_runs_as_root(stage: str) -> None:
    assert only(stage, "USER") == "10001:10001"
    names = [name for name, _ in instructions(stage)]
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_the_producer_gets_no_torch() -> None:
    stages = ("common", "wheel", "producer-packages", "producer")
    text = " ".join(rest for stage in stages for _, rest in instructions(stage))

    assert "[cli,gateway,bulk,tokenizers,otel]" in text
    assert "torch" not in text
    assert "transformers" not in text


def test_a_plain_build_makes_the_worker_for_the_cpu() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)

    assert stages[-1] == "worker"
    assert ("ARG", "DEVICE=cpu") in instructions("worker-packages")


def test_the_supervisor_is_process_1_and_drains_on_sigterm() -> None:
    assert json.loads(only("worker", "ENTRYPOINT")) == ["python", "-m", "streamfleet_worker"]
    assert only("worker", "STOPSIGNAL") == "SIGTERM"


def test_its_variables_are_settings_that_exist() -> None:
    from streamfleet_worker.settings import WorkerSettings  # noqa: PLC0415

    ours = {name for name in environment("worker") if name.startswith("STREAMFLEET_")}

    assert ours == {
        "STREAMFLEET_HTTP_HOST",
        "STREAMFLEET_HTTP_PORT",
        "STREAMFLEET_LOG_FORMAT",
        "STREAMFLEET_WORKERS",
    }
    for name in ours:
        assert name.removeprefix("STREAMFLEET_").lower() in WorkerSettings.model_fields
    assert environment("worker")["STREAMFLEET_HTTP_PORT"] == only("worker", "EXPOSE")


def test_the_producer_s_variables_are_settings_that_exist() -> None:
    told = environment("producer")
    ours = {name.removeprefix("STREAMFLEET_") for name in told if name.startswith("STREAMFLEET_")}

    known = GatewaySettings.model_fields.keys() | BulkSettings.model_fields.keys()
    assert ours == {"BULK_FOLDER", "GATEWAY_HOST", "GATEWAY_PORT", "LOG_FORMAT"}
    assert {name.lower() for name in ours} <= known
    assert told["STREAMFLEET_GATEWAY_PORT"] == only("producer", "EXPOSE")
    assert json.loads(only("producer", "VOLUME")) == [told["STREAMFLEET_BULK_FOLDER"]]


def test_every_copied_path_exists_and_is_in_the_build_context() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for stage in ("common", "wheel")
        for name, rest in instructions(stage)
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }

    # The README is a pattern, so that an image can be built without one.
    assert copied - {"README.m[d]"} == let_in - {"README.md"}
    for source in copied - {"README.m[d]"}:
        assert (ROOT / source).exists()


# --- the health check, run for real ----------------------------------------------------------


@contextmanager
def worker_that_answers(status: int) -> Iterator[tuple[int, list[str]]]:
    """A server whose every answer is `status`; gives its port and the paths it is asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_asks_whether_it_is_ready(status: int, healthy: bool) -> None:
    options, _, command = only("worker", "HEALTHCHECK").partition("CMD ")
    program, *arguments = json.loads(command)
    assert program == "python"
    assert "--start-period=300s" in options

    with worker_that_answers(status) as (port, asked):
        answer = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "STREAMFLEET_HTTP_PORT": str(port), "no_proxy": "127.0.0.1"},
            capture_output=True,
            check=False,
        )

    assert asked == ["/readyz"]
    assert (answer.returncode == 0) is healthy
