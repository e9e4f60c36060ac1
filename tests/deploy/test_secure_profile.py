"""The secure profile: its server starts, the page's users work on it, its compose file fits the plain one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from papers import HOST, Papers
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from topology.nodes import REDIS, free_port, until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
CONF = (ROOT / "deploy" / "redis" / "redis.conf").read_text()
PLAIN = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())


class Merging(yaml.SafeLoader):
    """Knows the tags by which compose files change each other."""


Merging.add_constructor("!reset", lambda _loader, _node: "reset")
Merging.add_constructor("!override", lambda _loader, _node: "override")
SECURE: dict[str, Any] = yaml.load((ROOT / "deploy" / "compose.secure.yaml").read_text(), Merging)


def made_secrets(folder: Path, port: int) -> None:
    """Run the page's own lines, with the names of this machine, and for the Redis that it has."""
    (lines,) = re.findall(r"```\n(mkdir -m 700 secrets.*?)```", PAGE, re.DOTALL)
    lines = lines.replace("valkey:6379", f"{HOST}:{port}").replace("/run/secrets", str(folder / "secrets"))
    lines = lines.replace("streamfleet acl", "streamfleet acl --redis-7.0")
    program = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", lines], cwd=folder, env=env, check=True, capture_output=True, timeout=60)
    papers = Papers(folder)
    named = {"redis.pem": papers.server[0], "redis.key": papers.server[1]}
    named |= {"client.pem": papers.client[0], "client.key": papers.client[1], "ca.pem": papers.ca_file}
    for name, file in named.items():
        (folder / "secrets" / name).write_bytes(file.read_bytes())


@pytest.fixture
def secrets(tmp_path: Path) -> Iterator[Path]:
    """The folder of secrets, beside a server that runs with them."""
    port = free_port()
    made_secrets(tmp_path, port)
    folder = tmp_path / "secrets"
    conf = CONF.replace("/run/secrets", str(folder)).replace("tls-port 6379", f"tls-port {port}")
    (tmp_path / "redis.conf").write_text(f"{conf}dir {tmp_path}\nbind {HOST}\n")
    said = (tmp_path / "log").open("wb")
    process = subprocess.Popen([REDIS, tmp_path / "redis.conf"], stdout=said, stderr=said)
    until(lambda: b"Ready to accept" in (tmp_path / "log").read_bytes(), "a start of the server")
    yield folder
    process.kill()
    process.wait()
    said.close()


@pytest.mark.skipif(not REDIS.exists(), reason="no redis-server on this machine")
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_page_makes_users_that_work_on_the_server(secrets: Path) -> None:
    for role in ("worker", "gateway", "bulk"):
        connections = Connections.open((secrets / f"{role}-url").read_text().strip())
        await Broker(connections, "q").sweep()
        await connections.close()
    url = (secrets / "worker-url").read_text().strip()
    nobody = re.sub(r"worker:[0-9a-f]+@", "", url)
    with redis.Redis.from_url(nobody) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    with (
        redis.Redis.from_url(url.partition("&ssl_certfile")[0]) as client,
        pytest.raises(redis.ConnectionError),
    ):
        client.ping()


def test_the_server_keeps_what_the_plain_one_keeps() -> None:
    command = PLAIN["services"]["valkey"]["command"]
    flags = {command[at].removeprefix("--"): command[at + 1] for at in range(1, len(command), 2)}
    said = dict(line.split(" ", 1) for line in CONF.splitlines() if line and line[0] not in "# ")
    for name in ("maxmemory-policy", "appendonly", "appendfsync", "tcp-keepalive", "stream-node-max-bytes"):
        assert said[name] == flags[name], name
    assert said["client-output-buffer-limit"] == flags["client-output-buffer-limit"]
    assert said["port"] == "0"


def test_nobody_is_given_a_url_in_the_environment() -> None:
    wanted = {name for name, one in PLAIN["services"].items() if "STREAMFLEET_REDIS_URL" in str(one)}
    assert wanted == SECURE["services"].keys() - {"valkey"}
    for name in wanted:
        one = SECURE["services"][name]
        assert one["environment"]["STREAMFLEET_REDIS_URL"] == "reset"
        files = [value for key, value in one["environment"].items() if key.endswith("_FILE")]
        assert files
        assert {Path(file).name for file in files} | {"ca.pem", "client.pem", "client.key"} == set(
            one["secrets"]
        )
    used = {secret for one in SECURE["services"].values() for secret in one["secrets"]}
    assert used == SECURE["secrets"].keys()
    mentioned = set(re.findall(r"/run/secrets/([\w.-]+)", CONF + str(SECURE["services"]["valkey"])))
    assert mentioned <= set(SECURE["services"]["valkey"]["secrets"])
