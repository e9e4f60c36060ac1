"""Tiny models with random weights, as real folders on disk: what an engine loads, in a fraction of a second.

Their embeddings are not tied and their weights are wide, so that greedy text wanders instead of repeating
one token for ever, and a mistake in a mask or a position changes it at once.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

Kind = Literal["llama", "gpt2"]

VOCAB_SIZE = 1024
MAX_POSITIONS = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ("textwrap.py", "json/decoder.py", "heapq.py", "string.py", "statistics.py", "this.py")


def tiny_model(kind: Kind = "llama") -> Path:
    """A folder with a model, its tokenizer and its chat template; made once per machine and version.

    A fleet test starts a worker on it with STREAMFLEET_MODEL set to this folder.
    """
    made_from = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    home = Path(tempfile.gettempdir()) / f"streamfleet-tests-{os.getuid()}"
    target = home / f"{kind}-{made_from}"
    if target.exists():
        return target
    # Several test processes may come here at once: each makes its own, and the first one's stays.
    draft = home / f".{kind}-{secrets.token_hex(4)}"
    draft.mkdir(parents=True)
    build_tokenizer().save_pretrained(draft)
    build_model(kind).save_pretrained(draft)
    try:
        draft.rename(target)
    except OSError:
        shutil.rmtree(draft)
    return target


def build_tokenizer() -> Any:
    """A byte-level BPE trained on a few sources of the standard library."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    tokenizer.train([str(library / name) for name in CORPUS], trainer)
    wrap: Any = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def build_model(kind: Kind = "llama", seed: int = 0) -> Any:
    """A model of 2 layers with hidden size 64, float32."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "gpt2":
            config = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=MAX_POSITIONS, **common)
            return GPT2LMHeadModel(config)
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=160,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=MAX_POSITIONS,
                **common,
            )
        )
