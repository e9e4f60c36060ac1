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
from typing import Any, Literal, get_args

import tokenizers
import torch
import transformers
from transformers import PreTrainedTokenizerFast

Kind = Literal[
    "llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt_neox", "mixtral", "tied", "long"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
VOCAB_SIZE = 1024
MAX_POSITIONS = 512
WINDOW = 48
"""Tokens that the layers with a window look at."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
GROUPED = {"num_key_value_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
RECIPES: dict[Kind, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "gpt2": ("GPT2", {"n_inner": 256}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 24}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": WINDOW}),
    # Caps that are reached, and a window in every other layer.
    "gemma2": (
        "Gemma2",
        {
            **GROUPED,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 0.3,
            "final_logit_softcapping": 2.0,
        },
    ),
    "phi3": ("Phi3", {**GROUPED, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    # As many key-value heads as heads; attention and feed-forward side by side.
    "gpt_neox": ("GPTNeoX", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "tied": ("Llama", {**GROUPED, "tie_word_embeddings": True}),
    "long": ("Llama", {**GROUPED, "max_position_embeddings": 4608}),
}
"""The family of each kind, and how it differs from the others."""

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
    """A model of 2 layers (Gemma 2: 4, since they alternate) with hidden size 64, float32."""
    family, own = RECIPES[kind]
    config = getattr(transformers, f"{family}Config")
    make = getattr(transformers, f"{family}{'LMHeadModel' if kind == 'gpt2' else 'ForCausalLM'}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make(config(**{**COMMON, **own}))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # a new one is zero
                torch.nn.init.normal_(parameter, std=0.05)
            if kind == "tied" and name.endswith(("o_proj.weight", "down_proj.weight")):
                # Layers that outweigh what comes in, or a tied head names the last token for ever.
                torch.nn.init.normal_(parameter, std=1.0)
    return model
