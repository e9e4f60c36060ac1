"""A reference to a loaded encoder: what reads whole texts and gives vectors or the scores of labels."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, AutoModelForSequenceClassification

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine.aliases import resolve
from streamfleet_worker.engine.checkpoint import Checkpoint, rope_limit
from streamfleet_worker.engine.devices import INT8, describe, find_device, find_precision
from streamfleet_worker.engine.int8_linear import int8_or_packed, require_int8
from streamfleet_worker.engine.lean_norm import lean_norms
from streamfleet_worker.engine.model_source import Progress, find_source
from streamfleet_worker.engine.packed_linear import pack_linears, packed_bytes
from streamfleet_worker.engine.sentence_modules import FILE, Pooling, SentenceModules, read_modules
from streamfleet_worker.engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Head = Literal["embed", "classify"]

LABELLED = "ForSequenceClassification"
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_BARE = ("Model", "ForMaskedLM", "ForPreTraining")
_SANE_LENGTH = 1 << 24
"""Tokenizers without a limit say 10^30."""


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """An encoder, ready to run: `model(input_ids, attention_mask)` gives `last_hidden_state` or `logits`."""

    name: str
    """The reference it was loaded by."""
    revision: str
    """The hub's commit, or a digest of the files."""
    model: Any
    tokenizer: Tokenizer
    device: torch.device
    device_name: str
    """The device in words."""
    dtype: torch.dtype
    """Of what goes from layer to layer."""
    precision: str
    """The type of the weights, by name."""
    max_positions: int
    """The longest text the model can read, in tokens, control tokens included."""
    vocab_size: int
    pad_token_id: int
    """What fills a row up; to be masked."""
    weights_bytes: int
    head: Head
    labels: tuple[str, ...]
    """What the columns of the logits are called; () if it gives vectors."""
    multi_label: bool
    """Whether each label holds or not by itself; otherwise exactly one does."""
    pooling: Pooling
    """How the vectors of tokens become the text's, as the model was trained."""
    normalize: bool
    """Whether the text's vector is brought to length one, as the model was trained."""


def load_encoder(
    reference: str,
    device: str = "auto",
    precision: str = "auto",
    *,
    aliases: Path | None = None,
    pack: bool = True,
    progress: Progress = log.info,
) -> EncoderModel:
    """Load an encoder, or a decoder whose last token stands for the text.

    With a head for sequence classification it gives the scores of labels, otherwise vectors.

    Args:
        reference: an alias, a folder, or the name of a hub repository, as `find_source` takes it.
        device: "auto", "cpu", "cpu:<threads>", "cuda", "cuda:<number>", "mps".
        precision: "auto" (float32 on a CPU, else bfloat16), "float32", "bfloat16", "float16", or "int8":
            linear layers in it and the rest in bfloat16, on a CPU.
        aliases: a file of further aliases.
        pack: make the model faster; it can no longer be saved.
        progress: called with a sentence before anything slow.

    Raises:
        ModelLoadFailed: there is no such model, or it is none we can run; the message says what to do.
        TokenizerFailed: the weights are there, the tokenizer is not.
        Unsupported: the device or precision is not to be had; `feature` names it.
    """
    alias = resolve(reference, device, precision, aliases)
    place = find_device(alias.device)
    if alias.precision == INT8:
        require_int8(place)
    dtype = find_precision("bfloat16" if alias.precision == INT8 else alias.precision, place)
    source = find_source(alias.reference, progress)
    exactly = INT8 if alias.precision == INT8 else str(dtype).removeprefix("torch.")
    progress(f"loading {reference} in {exactly} on {describe(place)}")
    modules = read_modules(source.folder)
    checkpoint = Checkpoint(source)
    head: Head = "classify" if checkpoint.architecture.endswith(LABELLED) else "embed"
    model = _build(checkpoint, head, place, dtype)
    loaded = checkpoint.tokenizer()
    model.config.use_cache = False
    if pack:
        lean_norms(model, dtype)
    if place.type == "cpu" and (pack or alias.precision == INT8):
        pack_linears(model, dtype, int8_or_packed if alias.precision == INT8 else None)
    looks_ahead = _looks_ahead(reference, model, place)
    padding = [model.config.pad_token_id, loaded.pad_token_id]
    if head == "classify" and not looks_ahead and padding[0] is None:
        raise ModelLoadFailed(
            f"{reference} reads the label off the last token of a text, but its config.json has no "
            "pad_token_id by which to find it"
        )
    config = model.config
    labels = tuple(str(config.id2label[i]) for i in range(config.num_labels)) if head == "classify" else ()
    return EncoderModel(
        name=reference,
        revision=source.revision,
        model=model,
        tokenizer=Tokenizer(loaded),
        device=place,
        device_name=describe(place),
        dtype=dtype,
        precision=exactly,
        max_positions=_max_positions(reference, model, loaded, modules),
        vocab_size=model.get_input_embeddings().num_embeddings,
        pad_token_id=next((token for token in padding if token is not None), 0),
        weights_bytes=sum(t.numel() * t.element_size() for t in model.parameters()) + packed_bytes(model),
        head=head,
        labels=labels,
        multi_label=head == "classify" and config.problem_type == "multi_label_classification",
        pooling=modules.pooling or ("mean" if looks_ahead else "last"),
        normalize=modules.normalize,
    )


def kind_of(
    reference: str, *, aliases: Path | None = None, progress: Progress = log.info
) -> Literal["generation", "encoder"]:
    """Which engine a model is for, by what was saved of it.

    Raises:
        ModelLoadFailed: there is no such model, or no engine for its kind.
    """
    source = find_source(resolve(reference, "auto", "auto", aliases).reference, progress)
    if source.gguf is not None:
        return "generation"
    if (source.folder / FILE).is_file():
        return "encoder"
    name = Checkpoint(source).architecture
    if name.endswith(_GENERATING):
        return "generation"
    if name.endswith((LABELLED, *_BARE)):
        return "encoder"
    raise ModelLoadFailed(
        f"{reference} is {f'a {name}' if name else 'of a kind that its config.json does not name'}: what can "
        f"be run are decoders (…ForCausalLM), classifiers (…{LABELLED}) and bare encoders (…Model)"
    )


def _build(checkpoint: Checkpoint, head: Head, device: torch.device, dtype: torch.dtype) -> Any:
    if checkpoint.config.is_encoder_decoder:
        raise ModelLoadFailed(
            f"{checkpoint.source.reference} is a {checkpoint.architecture or 'model'}, an encoder with a "
            "decoder: only one of both can be run here"
        )
    if head == "classify":
        return checkpoint.build(AutoModelForSequenceClassification, device, dtype)
    kind: Any = MODEL_MAPPING.get(type(checkpoint.config), None)
    takes = inspect.signature(kind).parameters if isinstance(kind, type) else {}
    # The layer on top of the first token is for other tasks, and often was not saved.
    options = {"add_pooling_layer": False} if "add_pooling_layer" in takes else {}
    return checkpoint.build(AutoModel, device, dtype, **options)


@torch.inference_mode()
def _looks_ahead(reference: str, model: Any, device: torch.device) -> bool:
    """Whether a token sees what comes behind it. Tried, since configs do not tell.

    Raises:
        ModelLoadFailed: the model does not run.
    """
    # Neither is padding in any model, whatever their meaning.
    ids = torch.tensor([[5, 6, 5], [5, 6, 6]], device=device)
    try:
        one, other = (
            model(input_ids=row, attention_mask=torch.ones_like(row), output_hidden_states=True)
            for row in (ids[:1], ids[1:])
        )
        return not torch.equal(one.hidden_states[-1][0, 0], other.hidden_states[-1][0, 0])
    except Exception as error:
        raise ModelLoadFailed(
            f"{reference} is a {type(model).__name__} that does not run: {error}"[:1000]
        ) from error


def _max_positions(reference: str, model: Any, tokenizer: Any, modules: SentenceModules) -> int:
    config = model.config
    limits = [getattr(config, "max_position_embeddings", None), rope_limit(config), modules.max_length]
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            # RoBERTa's kind counts from behind the place of padding.
            limits.append(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))
    if tokenizer.model_max_length < _SANE_LENGTH:
        limits.append(tokenizer.model_max_length)
    found = [limit for limit in limits if limit]
    if not found:
        raise ModelLoadFailed(f"{reference} does not say how long a text it can read")
    return int(min(found))
