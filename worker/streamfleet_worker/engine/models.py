"""A reference (alias, folder, GGUF file or hub name) to a loaded language model and its tokenizer."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine.aliases import resolve
from streamfleet_worker.engine.checkpoint import Checkpoint, rope_limit
from streamfleet_worker.engine.devices import describe, find_device, find_precision
from streamfleet_worker.engine.kv_cache import CacheShape
from streamfleet_worker.engine.lean_norm import lean_norms
from streamfleet_worker.engine.model_source import Progress, find_source
from streamfleet_worker.engine.packed_linear import pack_linears, packed_bytes
from streamfleet_worker.engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)


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


def load(
    reference: str,
    device: str = "auto",
    precision: str = "auto",
    *,
    aliases: Path | None = None,
    pack: bool = True,
    progress: Progress = log.info,
) -> LoadedModel:
    """Load a model.

    Args:
        reference: an alias, a folder, a GGUF file or a name on the hub, as `find_source` takes it.
        device: "auto", "cpu", "cpu:<threads>", "cuda", "cuda:<number>", "mps".
        precision: "auto" (float32 on a CPU, else bfloat16), "float32", "bfloat16" or "float16".
        aliases: a file of further aliases.
        pack: make the model faster: norms in one call and, on a CPU, weights of linear layers laid out for
            it. It can no longer be saved.
        progress: called with a sentence before anything slow.

    Only safetensors and GGUF files are read, and no code from the model's repository is run.

    Raises:
        ModelLoadFailed: there is no such model, or it is none we can run; the message says what to do.
        TokenizerFailed: the weights are there, the tokenizer is not.
        Unsupported: the device or precision is not to be had; `feature` names it.
    """
    alias = resolve(reference, device, precision, aliases)
    place = find_device(alias.device)
    dtype = find_precision(alias.precision, place)
    source = find_source(alias.reference, progress)
    progress(f"loading {reference} in {str(dtype).removeprefix('torch.')} on {describe(place)}")
    checkpoint = Checkpoint(source)
    model = checkpoint.build(AutoModelForCausalLM, place, dtype)
    tokenizer = checkpoint.tokenizer()
    text_config = model.config.get_text_config(decoder=True)
    if pack:
        lean_norms(model, dtype)
        if place.type == "cpu":
            pack_linears(model, dtype)
    shape = _inspect(reference, model, place)
    positions = [getattr(text_config, "max_position_embeddings", None), rope_limit(text_config)]
    if not any(positions):
        raise ModelLoadFailed(f"{reference} does not say how long a sequence it can read")
    ends = (tokenizer.eos_token_id, text_config.eos_token_id, model.generation_config.eos_token_id)
    return LoadedModel(
        name=reference,
        revision=source.revision,
        model=model,
        tokenizer=Tokenizer(tokenizer),
        eos_token_ids=_ids(*ends),
        device=place,
        device_name=describe(place),
        dtype=dtype,
        cache_shape=shape,
        attention=model.config._attn_implementation,  # noqa: SLF001  it has no other name
        max_positions=min(p for p in positions if p),
        vocab_size=model.get_input_embeddings().num_embeddings,
        weights_bytes=sum(t.numel() * t.element_size() for t in model.parameters()) + packed_bytes(model),
    )


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


def _ids(*values: int | list[int] | None) -> frozenset[int]:
    found: set[int] = set()
    for value in values:
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
