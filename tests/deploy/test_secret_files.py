"""Secrets from files: who reads them, what counts, what is said of those that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import environment, streamfleet
from deploy.guarded import Guarded
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.secret_files import read_secret, secret_of
from streamfleet_common.settings import FleetSettings, misspelled, read
from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.gateway.settings import GatewaySettings
from streamfleet_worker.settings import WorkerSettings

URL = "redis://worker:a secret@broker:6379/0"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "redis-url"
    path.write_text(URL + "\n")
    monkeypatch.setenv("STREAMFLEET_REDIS_URL_FILE", str(path))
    return path


@pytest.mark.parametrize("settings", [FleetSettings, GatewaySettings, BulkSettings, WorkerSettings])
def test_every_process_reads_its_url_from_a_file(
    settings: type[FleetSettings], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(settings).redis_url == URL
    file.write_text("redis://new@broker/0")  # rotated, for the next start
    assert read(settings).redis_url == "redis://new@broker/0"
    monkeypatch.setenv("STREAMFLEET_REDIS_URL", "redis://said/0")
    assert read(settings).redis_url == "redis://said/0"


def test_the_url_of_bulk_jobs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rq").write_text("redis://jobs/0")
    monkeypatch.setenv("STREAMFLEET_RQ_URL_FILE", str(tmp_path / "rq"))
    assert read(BulkSettings).jobs_url == "redis://jobs/0"
    assert read(GatewaySettings).rq_url == "redis://jobs/0"


def test_names_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["STREAMFLEET_REDIS_URL_FILE", "STREAMFLEET_RQ_URL_FILE", "STREAMFLEET_REDIS_URL_FLE"]
    assert misspelled(GatewaySettings, names) == {"STREAMFLEET_REDIS_URL_FLE": "STREAMFLEET_REDIS_URL_FILE"}
    assert secret_of("X", {}) is None
    assert secret_of("X", {"X": "said", "X_FILE": "/nowhere"}) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "one line"), (b"a\nb\n", "one line"), (b"\xff\xfe", "no text"), (None, "read")],
)
def test_a_file_that_holds_no_secret(file: Path, content: bytes | None, words: str) -> None:
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=f"STREAMFLEET_REDIS_URL_FILE.*{words}"):
        read(FleetSettings)


def test_a_secret_may_have_spaces(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b" a b \r\n")
    assert read_secret(tmp_path / "s") == " a b "


def test_the_command_line_reads_it(guarded: Guarded, tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text(guarded.url("metrics"))
    env = environment(STREAMFLEET_REDIS_URL_FILE=str(path))
    found = streamfleet("queues", "--json", env=env)
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr
    path.unlink()
    found = streamfleet("queues", env=env)
    assert found.returncode == 2, found
    assert "STREAMFLEET_REDIS_URL_FILE" in found.stderr
    assert "Traceback" not in found.stderr


def test_acl_prints_a_line_without_the_password(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("hunter2\n")
    said = ("acl", "producer", "--user", "web", "--queue", "q", "--tenant", "acme")
    made = streamfleet(*said, "--password-file", str(tmp_path / "p"))
    assert made.returncode == 0, made.stderr
    # SHA-256 of hunter2, as `printf hunter2 | sha256sum` gives it.
    digest = "f52fbd32b2b3b86ff88ef6c490628285f482af15ddcb29541f94bcf526a3f6c7"
    assert made.stdout.startswith(f"user web on resetpass resetkeys resetchannels clearselectors #{digest} ")
    assert " &{q:q:0}:c:acme:* " in made.stdout
    assert "hunter2" not in made.stdout + made.stderr
    assert streamfleet("acl", "nobody").returncode != 0
