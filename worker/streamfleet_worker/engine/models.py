"""A reference (alias, folder, GGUF file or hub name) to a loaded model and tokenizer."""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as transformers_logging

from streamfleet_common.errors import ModelLoadFailed, TokenizerFailed
from streamfleet_worker.engine import smollm2
from streamfleet_worker.engine.devices import describe, find_device, find_precision
from streamfleet_worker.engine.kv_cache import CacheShape
from streamfleet_worker.engine.lean_norm import lean_norms
from streamfleet_worker.engine.packed_linear import pack_linears, packed_bytes
from streamfleet_worker.engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Told, in words, what takes a while."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
"""Weight files that may run code when read, or that need another framework."""

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, ready to run."""

    name: str
    """The reference it was loaded by."""
    revision: str
    """The hub's commit, or a digest of the files."""
    model: Any
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    """Every token that ends the text: the tokenizer's, the config's and the generation config's."""
    device: torch.device
    device_name: str
    """The device in words."""
    dtype: torch.dtype
    cache_shape: CacheShape
    attention: str
    """The model's own attention, in transformers' name for it."""
    max_positions: int
    """The longest sequence the model can read, in tokens."""
    vocab_size: int
    weights_bytes: int

    @property
    def precision(self) -> str:
        """The type of the weights, by name."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the files are, in transformers' terms."""

    path: str
    options: dict[str, Any]
    folder: Path | None
    revision: str | None = None


def load(
    reference: str,
    device: str = "auto",
    precision: str = "auto",
    *,
    pack: bool = True,
    progress: Progress = log.info,
) -> LoadedModel:
    """Load a model.

    Args:
        reference: the alias "smollm2"; a folder as `save_pretrained` writes it; a GGUF file; or the name
            of a hub repository, "organisation/name", with "@revision" if wanted.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        precision: "auto" (float32 on a CPU, else bfloat16), "float32", "bfloat16" or "float16".
        pack: make the model faster: norms in one call and, on a CPU, weights of linear layers laid out for
            it. It can no longer be saved.
        progress: called with a sentence before anything slow.

    Only safetensors and GGUF files are read, and no code from the model's repository is run.

    Raises:
        ModelLoadFailed: there is no such model, or it is none we can run; the message says what to do.
        TokenizerFailed: the weights are there, the tokenizer is not.
        DeviceUnavailable: the device or precision is not to be had.
    """
    place = find_device(device)
    dtype = find_precision(precision, place)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = _find(reference, progress)
    progress(f"loading {reference} in {str(dtype).removeprefix('torch.')} on {describe(place)}")
    try:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=False, **source.options)
        model = _build(source, config, place, dtype)
    except ModelLoadFailed:
        raise
    except Exception as error:  # whatever broken files make the libraries raise
        raise _failure(reference, source, error) from error
    tokenizer, tokenizer_eos = _load_tokenizer(reference, source)
    text_config = model.config.get_text_config(decoder=True)
    if pack:
        lean_norms(model, dtype)
        if place.type == "cpu":
            pack_linears(model, dtype)
    shape = _inspect(reference, model, place)
    positions = [getattr(text_config, "max_position_embeddings", None), _rope_limit(text_config)]
    if not any(positions):
        raise ModelLoadFailed(f"{reference} does not say how long a sequence it can read")
    return LoadedModel(
        name=reference,
        revision=source.revision or getattr(config, "_commit_hash", None) or "unknown",
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=_ids(tokenizer_eos, text_config.eos_token_id, model.generation_config.eos_token_id),
        device=place,
        device_name=describe(place),
        dtype=dtype,
        cache_shape=shape,
        attention=model.config._attn_implementation,  # noqa: SLF001  it has no other name
        max_positions=min(p for p in positions if p),
        vocab_size=model.get_input_embeddings().num_embeddings,
        weights_bytes=sum(t.numel() * t.element_size() for t in model.parameters()) + packed_bytes(model),
    )


def _find(reference: str, progress: Progress) -> _Source:
    path = Path(reference).expanduser()
    if path.is_dir():
        return _find_in_folder(reference, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadFailed(
                f"{reference} is a file, but not a GGUF file: name its folder, or a .gguf file"
            )
        options = {"gguf_file": path.name}
        return _Source(str(path.parent), options, path.parent, digest([path]))
    if reference == smollm2.ALIAS:
        folder = smollm2.folder(progress)
        return _Source(str(folder), {}, folder, smollm2.revision(folder))
    match = _HUB_NAME.fullmatch(reference)
    if match is None or reference.startswith((".", "/", "~")):
        raise ModelLoadFailed(
            f"no model {reference!r}: there is no such folder or file, and it is neither the alias "
            f"{smollm2.ALIAS!r} nor the name of a hub repository (organisation/name)"
        )
    options = {"revision": match["revision"]} if match["revision"] else {}
    progress(f"looking for {reference} in the local hub cache, then on the hub")
    return _Source(match["name"], options, None)


def _find_in_folder(reference: str, folder: Path) -> _Source:
    safe = sorted(folder.glob("*.safetensors"))
    ggufs = sorted(folder.glob("*.gguf"))
    if not safe and len(ggufs) == 1:
        return _Source(str(folder), {"gguf_file": ggufs[0].name}, folder, digest(ggufs))
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
    return _Source(str(folder), {}, folder, digest([*safe, *sorted(folder.glob("*.json"))]))


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


def _build(source: _Source, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {
        "trust_remote_code": False,
        "use_safetensors": True,
        "dtype": dtype,
        **source.options,
    }
    if "gguf_file" in options:
        del options["use_safetensors"]
    else:
        options["config"] = config
    if device.type == "cuda":
        options["device_map"] = {"": device}
    options["output_loading_info"] = True
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source.path, attn_implementation="sdpa", **options)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        loaded = AutoModelForCausalLM.from_pretrained(source.path, attn_implementation="eager", **options)
    model, report = loaded
    if report["missing_keys"]:
        # transformers would make them up at random, and say so in a log.
        missing = sorted(report["missing_keys"])
        raise ModelLoadFailed(
            f"the weights are not those of a {type(model).__name__}: {len(missing)} tensors are missing "
            f"({', '.join(missing[:3])}{', …' if missing[3:] else ''})"
        )
    return model.to(device).eval().requires_grad_(False)


def _load_tokenizer(reference: str, source: _Source) -> tuple[Tokenizer, int | None]:
    try:
        loaded = AutoTokenizer.from_pretrained(source.path, trust_remote_code=False, **source.options)
    except Exception as error:
        raise TokenizerFailed(
            f"the tokenizer of {reference} cannot be read ({error}): a model needs its tokenizer.json "
            "and tokenizer_config.json beside the weights"
        ) from error
    return Tokenizer(loaded), loaded.eos_token_id


def _inspect(reference: str, model: Any, device: torch.device) -> CacheShape:
    """Shape of the model's keys and values.

    Raises:
        ModelLoadFailed: its state is not a key and a value for each token, alike in all layers.
    """
    kind = type(model).__name__
    accepted = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder or not {"position_ids", "cache"} <= accepted.keys():
        raise ModelLoadFailed(
            f"{reference} is a {kind}: only decoders that take position ids and a standard key-value "
            "cache can be batched here"
        )
    if not model._supports_attention_backend:  # noqa: SLF001  the library's own word for it
        raise ModelLoadFailed(
            f"{reference} is a {kind}, whose attention cannot be replaced: it cannot be batched here"
        )
    cache = DynamicCache(config=model.config)
    try:
        with torch.inference_mode():
            ids = torch.zeros(1, 1, dtype=torch.long, device=device)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), cache=cache)
    except Exception as error:
        raise ModelLoadFailed(f"{reference} is a {kind} that does not run: {error}"[:1000]) from error
    layers: list[Any] = list(cache.layers)
    odd = {type(layer).__name__ for layer in layers} - {
        DynamicLayer.__name__,
        DynamicSlidingWindowLayer.__name__,
    }
    if odd or not all(layer.is_initialized for layer in layers):
        raise ModelLoadFailed(
            f"{reference} is a {kind} whose cache is not the standard one "
            f"({', '.join(sorted(odd)) or 'layers share it'}): it cannot be batched here"
        )
    shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers}
    if len(shapes) > 1:
        raise ModelLoadFailed(
            f"{reference} is a {kind} whose layers have caches of unlike sizes: it cannot be batched here"
        )
    return CacheShape(len(layers), *shapes.pop())


def _rope_limit(config: Any) -> int | None:
    """Length up to which positions are encoded alike for all rows.

    Beyond it, "dynamic" and "longrope" scaling change with the longest row of a batch.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
    return None


def _ids(*values: int | list[int] | None) -> frozenset[int]:
    found: set[int] = set()
    for value in values:
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def _failure(reference: str, source: _Source, error: Exception) -> ModelLoadFailed:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if source.folder is None:
        return ModelLoadFailed(
            f"{reference} cannot be fetched from the hub: {first_line} Is the name right, is there a "
            "network, and does it have safetensors weights? Without a network, copy the model's folder "
            "here and name the folder, or use the alias 'smollm2'"
        )
    if "trust_remote_code" in str(error):
        return ModelLoadFailed(f"{reference} needs code of its own to run, which is never executed here")
    return ModelLoadFailed(f"{reference} cannot be loaded: {first_line}")
