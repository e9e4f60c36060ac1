"""From a reference to files of one revision. The hub is its own local cache here, or a stand-in."""

import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine import models
from streamfleet_worker.engine.encoder_model import kind_of, load_encoder
from streamfleet_worker.engine.model_source import find_source
from tiny_encoder import tiny_encoder
from tiny_model import build_model, tiny_model

OLD, NEW = "a" * 40, "b" * 40


def silent(_: str) -> None:
    """Hears of progress."""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """organisation/name in the hub's local cache, without a network; `main` is at `NEW`, `v1` at `OLD`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--organisation--name"
    for commit, names in ((OLD, ("v1",)), (NEW, ("main", "refs/pr/1"))):
        shutil.copytree(tiny_model(), repository / "snapshots" / commit)
        shutil.copytree(tiny_encoder("bert"), repository / "snapshots" / commit / "inner" / "vectors")
        for name in names:
            (repository / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / "refs" / name).write_text(commit)
    build_model(seed=1).save_pretrained(repository / "snapshots" / OLD)
    return repository


@pytest.mark.parametrize(
    ("reference", "commit"),
    [
        ("organisation/name", NEW),
        ("organisation/name@v1", OLD),
        (f"organisation/name@{OLD}", OLD),
        ("hf://organisation/name", NEW),
        ("hf://organisation/name@v1", OLD),
        ("hf://organisation/name@refs/pr/1", NEW),
    ],
)
def test_a_hub_reference_is_pinned_to_its_commit(repository: Path, reference: str, commit: str) -> None:
    source = find_source(reference, silent)
    assert source.folder == repository / "snapshots" / commit
    assert source.revision == commit
    loaded = models.load(reference, "cpu")
    assert (loaded.name, loaded.revision) == (reference, commit)
    wanted = build_model(seed=1 if commit == OLD else 0).get_input_embeddings().weight
    assert torch.equal(loaded.model.get_input_embeddings().weight, wanted)


@pytest.mark.parametrize(
    ("reference", "commit"),
    [
        ("hf://organisation/name/inner/vectors", NEW),
        ("hf://organisation/name@v1/inner/vectors/", OLD),
        ("hf://organisation/name@refs/pr/1/inner/vectors", NEW),
    ],
)
def test_a_subfolder_of_a_repository(repository: Path, reference: str, commit: str) -> None:
    source = find_source(reference, silent)
    assert source.folder == repository / "snapshots" / commit / "inner" / "vectors"
    loaded = load_encoder(reference, "cpu")
    assert (loaded.head, loaded.revision) == ("embed", commit)
    assert kind_of(reference) == "encoder"


def test_a_file_of_a_repository(repository: Path) -> None:
    (repository / "snapshots" / NEW / "inner" / "model.gguf").write_bytes(b"GGUF")
    source = find_source("hf://organisation/name/inner/model.gguf", silent)
    assert (source.folder.name, source.gguf, source.revision) == ("inner", "model.gguf", NEW)


def test_the_commit_is_looked_up_once(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def moving(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(repository / "snapshots" / (OLD if len(asked) == 1 else NEW))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", moving)
    loaded = models.load("organisation/name@main", "cpu")
    assert [(call["name"], call["revision"]) for call in asked] == [("organisation/name", "main")]
    assert loaded.revision == OLD
    assert torch.equal(
        loaded.model.get_input_embeddings().weight, build_model(seed=1).get_input_embeddings().weight
    )


REPOSITORY = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
    "1_Pooling/config.json",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "model.fp16.safetensors",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "modeling.py",
    "onnx/model.onnx",
    "inner/config.json",
    "inner/model.safetensors",
    "inner/onnx/model.safetensors",
    "inner/small.gguf",
)


@pytest.mark.parametrize(
    ("reference", "left"),
    [
        ("hf://o/n", {*REPOSITORY[:9], "inner/config.json"}),
        ("hf://o/n/inner", {"inner/config.json", "inner/model.safetensors"}),
        ("hf://o/n/inner/small.gguf", {"inner/small.gguf"}),
    ],
)
def test_only_what_is_read_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reference: str, left: set[str]
) -> None:
    def download(name: str, **options: Any) -> str:
        chosen = filter_repo_objects(
            REPOSITORY, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        )
        assert set(chosen) == left
        raise ConnectionError("enough")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadFailed, match="enough"):
        find_source(reference, silent)


@pytest.mark.parametrize(
    "reference", ["organisation/other", "organisation/name@v2", "hf://organisation/other/inner"]
)
def test_a_repository_that_is_not_to_be_had(repository: Path, reference: str) -> None:
    with pytest.raises(
        ModelLoadFailed, match=rf"{re.escape(reference)} cannot be .* copy the model's folder here"
    ):
        find_source(reference, silent)


def test_a_subfolder_that_is_not_there(repository: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=f"organisation/name holds no outer at {NEW}"):
        find_source("hf://organisation/name/outer", silent)


@pytest.mark.parametrize(
    "reference",
    [
        "./nowhere",
        "/nowhere/at/all",
        "~/nowhere",
        "nothing",
        "a/b/c",
        "",
        "../up",
        "hf://name",
        "hf://organisation/name@",
        "hf://organisation/name/../../etc",
        "hf://organisation/../etc",
        "http://organisation/name",
    ],
)
def test_what_is_no_reference(reference: str) -> None:
    with pytest.raises(
        ModelLoadFailed, match=r"no such folder.*smollm2, minilm, or one of STREAMFLEET_MODELS_FILE"
    ):
        find_source(reference, silent)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ModelLoadFailed, match="name its folder"):
        find_source(str(file), silent)


def test_files_of_a_folder(tmp_path: Path) -> None:
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    one.write_bytes(b"one")
    assert find_source(str(tmp_path), silent).gguf == "one.gguf"
    two.write_bytes(b"two")
    with pytest.raises(ModelLoadFailed, match=r"name one: one\.gguf, two\.gguf"):
        find_source(str(tmp_path), silent)
    first, second = find_source(str(one), silent), find_source(str(two), silent)
    assert (first.folder, first.gguf) == (tmp_path, "one.gguf")
    assert first.revision != second.revision


@pytest.mark.parametrize("name", ["vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"])
def test_a_model_with_another_vocabulary_or_template_is_another_one(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_encoder("bert"), folder)
    revisions = {find_source(str(folder), silent).revision}
    for content in ("one", "two"):
        (folder / name).write_text(content)
        revisions.add(find_source(str(folder), silent).revision)
    assert len(revisions) == 3
