"""Tiny encoders with random weights, as real folders on disk: bare ones, classifiers and rerankers.

A decoder that stands in for an encoder is `tiny_model`'s "llama" or "qwen3".
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

import tokenizers
import torch
import transformers
from tokenizers import processors

from tiny_model import CORPUS

Kind = Literal[
    "bert",
    "roberta",
    "distilbert",
    "modernbert",
    "sentence",
    "classifier",
    "tagger",
    "reranker",
    "roberta_reranker",
    "decoder_classifier",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
VOCAB_SIZE = 1024
MAX_POSITIONS = 128
"""Tokens of the longest text, control tokens included, of all kinds but "sentence"."""
SENTENCE_LENGTH = 48
"""The same of "sentence", whose folder says so."""
SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
CLS, PAD, SEP = 0, 1, 2
LABELS = ("bad", "good", "odd")

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.08,
    "pad_token_id": PAD,
    "bos_token_id": CLS,
    "cls_token_id": CLS,
    "eos_token_id": SEP,
    "sep_token_id": SEP,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
DISTILLED = {"dim": 64, "hidden_dim": 160, "n_layers": 2, "n_heads": 4}
OFFSET = {"max_position_embeddings": MAX_POSITIONS + PAD + 1}
LABELLED = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
ONE_LABEL = {"num_labels": 1}
WINDOW = {"local_attention": 8, "global_attn_every_n_layers": 2}
RECIPES: dict[Kind, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "Model", {}),
    "roberta": ("Roberta", "Model", OFFSET),
    "distilbert": ("DistilBert", "Model", DISTILLED),
    # Positions are turned in, not added, and every other layer sees a window only.
    "modernbert": ("ModernBert", "Model", WINDOW),
    "sentence": ("Bert", "Model", {}),
    "classifier": ("Bert", "ForSequenceClassification", LABELLED),
    "tagger": (
        "DistilBert",
        "ForSequenceClassification",
        {**DISTILLED, **LABELLED, "problem_type": "multi_label_classification"},
    ),
    "reranker": ("Bert", "ForSequenceClassification", ONE_LABEL),
    "roberta_reranker": ("Roberta", "ForSequenceClassification", {**OFFSET, **ONE_LABEL}),
    # Reads the label off the last token.
    "decoder_classifier": ("Qwen3", "ForSequenceClassification", {"num_key_value_heads": 2, **LABELLED}),
}
"""The family of each kind, its head, and how it differs from the others."""
TYPED = ("Bert", "Roberta")
"""Families whose tokenizers say that they want token types."""


def tiny_encoder(kind: Kind = "bert") -> Path:
    """A folder with a model and its tokenizer; made once per machine and version.

    That of "sentence" is as sentence-transformers writes it: the first token's vector, not normalised, and no
    text over `SENTENCE_LENGTH`.
    """
    made_from = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    home = Path(tempfile.gettempdir()) / f"streamfleet-tests-{os.getuid()}"
    target = home / f"encoder-{kind}-{made_from}"
    if target.exists():
        return target
    # Several test processes may come here at once: each makes its own, and the first one's stays.
    draft = home / f".{kind}-{secrets.token_hex(4)}"
    draft.mkdir(parents=True)
    typed = ["token_type_ids"] if RECIPES[kind][0] in TYPED else []
    build_tokenizer(model_input_names=["input_ids", *typed, "attention_mask"]).save_pretrained(draft)
    build_encoder(kind).save_pretrained(draft)
    if kind == "sentence":
        write_modules(draft, {"pooling_mode_cls_token": True}, max_seq_length=SENTENCE_LENGTH)
    try:
        draft.rename(target)
    except OSError:
        shutil.rmtree(draft)
    return target


def write_modules(
    folder: Path, pooling: dict[str, Any], *, normalize: bool = False, max_seq_length: int | None = None
) -> None:
    """Make a folder one of sentence-transformers'."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    steps = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))


def build_tokenizer(**options: Any) -> Any:
    """WordPiece trained on a few sources of the standard library, with the control tokens of BERT."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), show_progress=False
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    tokenizer.train([str(library / name) for name in CORPUS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    wrap: Any = transformers.PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        **options,
    )


def build_encoder(kind: Kind = "bert", seed: int = 0) -> Any:
    """A model of 2 layers with hidden size 64, float32."""
    family, head, own = RECIPES[kind]
    config = getattr(transformers, f"{family}Config")
    make = getattr(transformers, f"{family}{head}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make(config(**{**COMMON, **own}))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # a new one is zero
                torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()
