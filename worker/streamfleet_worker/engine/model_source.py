"""A reference (packaged model, folder, GGUF file or hub name) to files that are here, of one revision."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine import minilm, smollm2

Progress = Callable[[str], None]
"""Told, in words, what takes a while."""

PACKAGED: dict[str, Callable[[Progress], Path]] = {
    smollm2.ALIAS: smollm2.folder,
    minilm.ALIAS: minilm.folder,
}
"""Models that come in a Python package, by the alias that names each, and what gives its folder."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
"""Weight files that may run code when read, or that need another framework."""

HUB_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "model.safetensors", "model-*-of-*.safetensors")
"""What is fetched of a hub repository: what transformers reads, and no copies of it in other forms."""

_SHORT_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_HUB_NAME = re.compile(
    r"hf://(?P<name>[\w.-]+/[\w.-]+)"
    # The hub's own names of revisions are the only ones with a slash that can be told from a subfolder.
    r"(@(?P<revision>refs/(pr|convert)/[\w.-]+|[\w.-]+))?"
    r"(/(?P<inner>[\w.-]+(/[\w.-]+)*))?/?"
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files, all of one revision."""

    reference: str
    """The words it was found by."""
    folder: Path
    gguf: str | None
    """The GGUF file in the folder that is the whole model, if it is one."""
    revision: str
    """The hub's commit, or a digest of the files."""


def find_source(reference: str, progress: Progress) -> ModelSource:
    """Find a model, and fetch it where it comes from the hub.

    Args:
        reference: "smollm2" or "minilm"; a folder as `save_pretrained` writes it; a GGUF file;
            "organisation/name[@revision]" or "hf://organisation/name[@revision][/subfolder]", where the last
            part may also be a GGUF file.
        progress: called with a sentence before anything slow.

    Raises:
        ModelLoadFailed: there is no such model, or none with weights we read; the message says what to do.
    """
    if reference in PACKAGED:
        return _in_folder(reference, PACKAGED[reference](progress))
    if reference and not reference.startswith("hf://"):
        path = Path(reference).expanduser()
        if path.is_dir():
            return _in_folder(reference, path)
        if path.is_file():
            return _in_file(reference, path)
    pattern = _HUB_NAME if reference.startswith("hf://") else _SHORT_NAME
    match = pattern.fullmatch(reference)
    inner = (match.groupdict().get("inner") or "") if match else ""
    if (
        match is None
        or ".." in (*match["name"].split("/"), *inner.split("/"))
        or reference.startswith((".", "/", "~"))
    ):
        raise ModelLoadFailed(
            f"no model {reference!r}: there is no such folder or file, and it is neither an alias "
            f"({', '.join(PACKAGED)}, or one of STREAMFLEET_MODELS_FILE) nor the name of a hub repository "
            "(organisation/name[@revision] or hf://organisation/name[@revision][/subfolder])"
        )
    return _on_hub(reference, match["name"], match["revision"], inner, progress)


def digest(files: list[Path], sample_bytes: int = 1 << 20) -> str:
    """A short digest of names, sizes and content; of large files only both ends are read."""
    state = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            state.update(file.read(sample_bytes))
            file.seek(max(0, size - sample_bytes))
            state.update(file.read(sample_bytes))
    return state.hexdigest()[:16]


def _on_hub(reference: str, name: str, revision: str | None, inner: str, progress: Progress) -> ModelSource:
    """The files of one commit, from the local hub cache or the hub; the commit is looked up once."""
    progress(f"looking for {reference} on the hub, or in the local hub cache")
    is_file = inner.endswith(".gguf")
    wanted = [inner] if is_file else [f"{inner}/{file}" if inner else file for file in HUB_FILES]
    try:
        # Patterns reach into subfolders: another copy of the weights may lie there.
        snapshot = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=wanted,
            ignore_patterns=None if is_file else [f"{inner}/*/*.safetensors" if inner else "*/*.safetensors"],
        )
    except Exception as error:  # of the hub's client, of its connections, of the disk
        raise ModelLoadFailed(
            f"{reference} cannot be fetched from the hub: {first_line(error)} Is the name right, and is "
            "there a network? Without one, copy the model's folder here and name the folder, or use an alias "
            f"({', '.join(PACKAGED)})"
        ) from error
    place = Path(snapshot) / inner
    commit = Path(snapshot).name
    if place.is_dir():
        return _in_folder(reference, place, commit)
    if place.is_file():
        return _in_file(reference, place, commit)
    raise ModelLoadFailed(f"{reference}: the repository {name} holds no {inner} at {commit}")


def _in_file(reference: str, path: Path, revision: str | None = None) -> ModelSource:
    if path.suffix != ".gguf":
        raise ModelLoadFailed(f"{reference} is a file, but not a GGUF file: name its folder, or a .gguf file")
    return ModelSource(reference, path.parent, path.name, revision or digest([path]))


def _in_folder(reference: str, folder: Path, revision: str | None = None) -> ModelSource:
    safe = sorted(folder.glob("*.safetensors"))
    ggufs = sorted(folder.glob("*.gguf"))
    if not safe and len(ggufs) == 1:
        return _in_file(reference, ggufs[0], revision)
    if not safe:
        unsafe = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLED)
        if unsafe:
            raise ModelLoadFailed(
                f"{reference} has its weights in {', '.join(unsafe)} only, a format that can run code "
                "when it is read: convert them to safetensors (model.save_pretrained does it)"
            )
        if len(ggufs) > 1:
            names = ", ".join(f.name for f in ggufs)
            raise ModelLoadFailed(f"{reference} holds several GGUF files, name one: {names}")
        raise ModelLoadFailed(f"{reference} holds no weights: no .safetensors and no .gguf file")
    if not (folder / "config.json").exists():
        raise ModelLoadFailed(f"{reference} holds no config.json")
    # Vocabularies and chat templates among them: with others the model reads, or writes, another text.
    patterns = ("*.json", "*.txt", "*.model", "*.jinja", "*/config.json")
    settings = sorted(file for pattern in patterns for file in folder.glob(pattern))
    return ModelSource(reference, folder, None, revision or digest([*safe, *settings]))


def first_line(error: Exception) -> str:
    """What an error says, without the pages behind it."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
