"""What an RQ job is told: nothing but names that were looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.bulk.batch import BatchStatus, Counts, Progress
from streamfleet_producer.bulk.settings import BulkSettings, settings
from streamfleet_producer.bulk.spec import Spec

FIELDS: dict[str, Any] = {
    "id": "batch_" + "0" * 32,
    "queue": "q",
    "input_path": "/d/in",
    "output_path": "/d/out",
    "error_path": "/d/err",
}


def test_a_spec_comes_back_from_json() -> None:
    spec = Spec(**FIELDS, tenant="t", metadata={"a": "b"}, expires_at=7)
    assert Spec.read(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    "wrong", [None, [], 7, {}, FIELDS | {"more": 1}, FIELDS | {"id": "x"}, FIELDS | {"window": "1"}]
)
def test_what_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="not a bulk job"):
        Spec.read(wrong)


def spec_of(folder: Path, **paths: str) -> Spec:
    given: dict[str, Any] = {f"{kind}_path": str(folder / kind) for kind in ("input", "output", "error")}
    return Spec(id=FIELDS["id"], queue="q", **given | paths)


def test_files_in_its_folders_are_a_worker_s(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    spec_of(tmp_path / "deep").refuse_outside([Path("/none"), tmp_path])


@pytest.mark.parametrize("kind", ["input_path", "output_path", "error_path"])
@pytest.mark.parametrize("path", ["/etc/passwd", "{}/../out", "{}x/out", "out", "{}/link/out"])
def test_files_elsewhere_are_not(tmp_path: Path, kind: str, path: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="outside the folders"):
        spec_of(folder, **{kind: path.format(folder)}).refuse_outside([folder])


def test_progress_comes_back_from_json() -> None:
    progress = Progress(counts=Counts(4, 2, 1, 1), runs=3, error=InvalidRequest("no", problems=["a"]))
    progress.reach("in_progress", 5.0)
    progress.reach("in_progress", 6.0)
    found = Progress.of(progress.meta())
    assert found.meta() == progress.meta()
    assert found.times == {"in_progress": 5.0}
    assert isinstance(found.error, InvalidRequest)


@pytest.mark.parametrize("meta", [None, {}, {"status": "x"}, {"unserialized": "b"}, []])
def test_what_is_no_progress_is_that_of_the_first_moment(meta: Any) -> None:
    first: BatchStatus = "validating"
    assert Progress.of(meta).status == first


def test_settings_name_their_own_redis_and_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STREAMFLEET_REDIS_URL", "redis://fleet")
    assert settings().jobs_url == "redis://fleet"
    assert settings().folders == [Path.cwd()]
    monkeypatch.setenv("STREAMFLEET_RQ_URL", "redis://jobs")
    monkeypatch.setenv("STREAMFLEET_BULK_FOLDER", f"{tmp_path}:/")
    assert settings().jobs_url == "redis://jobs"
    assert settings().folders == [tmp_path.resolve(), Path("/")]
    monkeypatch.setenv("STREAMFLEET_RQ_LEASE_S", "1")
    with pytest.raises(InvalidRequest, match="STREAMFLEET_RQ_LEASE_S"):
        settings()


def test_settings_may_be_changed_by_a_command() -> None:
    assert BulkSettings(rq_url=None, redis_url="redis://a").jobs_url == "redis://a"
