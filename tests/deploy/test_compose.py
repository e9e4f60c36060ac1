"""The compose file, checked without a container engine."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compose_spec import PyCompose
from typer.testing import CliRunner

from gateway_process import Gateway
from streamfleet_common.embedded_binary import FLAGS, VALKEY_9_FLAGS, ServerBinary
from streamfleet_common.settings import FleetSettings, read
from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.cli.app import app
from streamfleet_producer.exporter.settings import ExporterSettings
from streamfleet_producer.gateway.settings import GatewaySettings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "compose.yaml").read_text()


@pytest.fixture
def services() -> dict[str, Any]:
    parsed: dict[str, Any] = PyCompose.from_yaml(TEXT).to_dict()["services"]
    return parsed


def seconds(duration: str) -> int:
    found = re.fullmatch(r"(\d+)s", duration)
    assert found
    return int(found[1])


def default(value: str) -> str:
    """What a value is where its variable is not set."""
    return re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)


@pytest.mark.parametrize(
    ("line", "planted", "words"),
    [
        ("stop_grace_period: 45s", "stop_grace_perid: 45s", "stop_grace_perid"),
        ("stop_grace_period: 45s", "stop_grace_period: 45 parsecs", "duration unit"),
        ("condition: service_healthy", "condition: healthy", "unknown variant `healthy`"),
        ("127.0.0.1:6379:6379", "127.0.0.1:99999:6379", "99999"),
        ("mem_limit: 2g", "mem_limit: lots", "unknown unit"),
    ],
)
def test_a_planted_error_is_found(line: str, planted: str, words: str) -> None:
    assert line in TEXT

    with pytest.raises(ValueError, match=re.escape(words)):
        PyCompose.from_yaml(TEXT.replace(line, planted))


def test_two_workers_wait_for_a_healthy_broker(services: dict[str, Any]) -> None:
    worker = services["worker"]

    assert set(services) == {"valkey", "worker", "gateway", "exporter", "bulk", "cron"}
    assert worker["scale"] == 2
    assert worker["depends_on"] == {"valkey": {"condition": "service_healthy"}}
    assert "valkey-cli ping" in str(services["valkey"]["healthcheck"]["test"])


def test_who_drains_is_given_more_time_to_stop(services: dict[str, Any]) -> None:
    for name in ("worker", "gateway"):
        drain_s = int(services[name]["environment"]["STREAMFLEET_DRAIN_TIMEOUT_S"])

        assert seconds(services[name]["stop_grace_period"]) >= drain_s + 10


def test_the_environment_is_what_a_worker_reads(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamfleet_worker.settings import WorkerSettings  # noqa: PLC0415

    variables: dict[str, str] = services["worker"]["environment"]
    for name, value in variables.items():
        # A setting nobody reads is ignored in silence, so a misspelt one must be found here.
        assert name.removeprefix("STREAMFLEET_").lower() in WorkerSettings.model_fields
        monkeypatch.setenv(name, default(value))

    settings = read(WorkerSettings)

    assert settings.redis_url == "redis://valkey:6379/0"
    assert settings.queue == "default"
    assert settings.model == "smollm2"
    assert settings.drain_timeout_s == 30.0
    assert str(settings.http_port) == variables["STREAMFLEET_HTTP_PORT"]


@pytest.mark.parametrize(
    ("service", "kind"),
    [
        ("gateway", GatewaySettings),
        ("exporter", ExporterSettings),
        ("bulk", BulkSettings),
        ("cron", BulkSettings),
    ],
)
def test_the_environment_is_what_the_others_read(
    services: dict[str, Any], service: str, kind: type[FleetSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables: dict[str, str] = services[service]["environment"]
    for name, value in variables.items():
        assert name.removeprefix("STREAMFLEET_").lower() in kind.model_fields
        monkeypatch.setenv(name, value)

    settings = read(kind)

    assert settings.redis_url == "redis://valkey:6379/0"


def test_gateway_and_bulk_worker_see_the_same_files(services: dict[str, Any]) -> None:
    assert services["gateway"]["environment"]["STREAMFLEET_FILES_DIR"] == "/files"
    assert services["bulk"]["environment"]["STREAMFLEET_BULK_FOLDER"] == "/files"
    for name in ("gateway", "bulk"):
        assert services[name]["volumes"] == ["files:/files"]


@pytest.mark.parametrize("service", ["gateway", "exporter", "bulk", "cron"])
def test_a_service_s_command_is_one_that_there_is(services: dict[str, Any], service: str) -> None:
    help_of = CliRunner().invoke(app, [*services[service]["command"], "--help"])

    assert help_of.exit_code == 0, help_of.output
    assert services[service]["image"] == services["gateway"]["image"]


async def test_the_gateway_s_health_check_asks_the_gateway(services: dict[str, Any], redis_url: str) -> None:
    kind, program, *arguments = services["gateway"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    async with Gateway(redis_url) as gateway:
        port = gateway.url.rpartition(":")[2]

        async def status() -> int:
            here = [word.replace(":8000/", f":{port}/") for word in arguments]
            asking = await asyncio.create_subprocess_exec(
                sys.executable, *here, stderr=asyncio.subprocess.DEVNULL, env={**os.environ, "no_proxy": "*"}
            )
            return await asking.wait()

        assert await status() == 0
    assert await status() == 1


def test_the_exporter_s_health_check_asks_where_it_listens(services: dict[str, Any]) -> None:
    exporter = services["exporter"]
    port = exporter["environment"]["STREAMFLEET_EXPORTER_PORT"]

    assert f"'http://127.0.0.1:{port}/healthz'" in exporter["healthcheck"]["test"][-1]
    assert str(ExporterSettings.model_fields["exporter_port"].default) == port


@pytest.mark.parametrize("service", ["worker", "gateway"])
def test_the_build_names_a_stage_that_exists(services: dict[str, Any], service: str) -> None:
    build = services[service]["build"]
    dockerfile = ROOT / "deploy" / build["context"] / build["dockerfile"]

    assert f" AS {build['target']}\n" in dockerfile.read_text()


@pytest.mark.parametrize(("service", "number"), [("valkey", 6379), ("gateway", 8000), ("exporter", 9108)])
def test_what_has_no_password_is_reachable_from_this_host_only(
    services: dict[str, Any], service: str, number: int
) -> None:
    (port,) = services[service]["ports"]

    published = port if isinstance(port, str) else f"{port['host_ip']}:{port['published']}"
    assert published.startswith(f"127.0.0.1:{number}")


def test_the_broker_keeps_what_it_accepted(services: dict[str, Any]) -> None:
    command: list[str] = services["valkey"]["command"]
    settings = dict(zip(command[1::2], command[2::2], strict=True))

    assert command[0] == "valkey-server"
    assert settings["--appendonly"] == "yes"
    assert settings["--appendfsync"] == "everysec"
    assert settings["--maxmemory-policy"] == "noeviction"
    assert settings["--maxmemory"] == "1gb"
    assert services["valkey"]["mem_limit"] in ("2g", "2gb", "2gib")
    assert services["valkey"]["volumes"] == ["broker:/data"]


def test_it_runs_like_the_embedded_broker(services: dict[str, Any]) -> None:
    """What the tests were run against and what is deployed differ only where they must."""
    command: list[str] = services["valkey"]["command"]
    deployed = dict(zip(command[1::2], command[2::2], strict=True))
    flags = FLAGS + VALKEY_9_FLAGS
    embedded = dict(zip(flags[::2], flags[1::2], strict=True))

    differing = {
        name for name in deployed.keys() | embedded.keys() if deployed.get(name) != embedded.get(name)
    }
    assert differing == {"--maxmemory", "--protected-mode"}


def test_the_server_starts_with_exactly_this_command(services: dict[str, Any], tmp_path: Path) -> None:
    binary = ServerBinary.find()
    assert binary.version_info >= (9,), "the compose file uses a setting of Valkey 9"
    here = ["--port", "0", "--unixsocket", str(tmp_path / "s"), "--dir", str(tmp_path)]
    command = [str(binary.path), *services["valkey"]["command"][1:], *here]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said: list[str] = []
        for line in server.stdout:
            said.append(line)
            if "Ready to accept connections" in line:
                server.terminate()

    assert any("Ready to accept connections" in line for line in said), "".join(said)
    assert server.returncode == 0
