"""What transformers itself makes of a tiny model: a copy of its own, with the library's attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tiny_model import Kind, tiny_model


@cache
def reference(kind: Kind, dtype: torch.dtype = torch.float32) -> Reference:
    return Reference(kind, dtype)


class Reference:
    """One request at a time."""

    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        # Only in full does Gemma 2 cap its scores.
        attention = "eager" if kind == "gemma2" else "sdpa"
        load: Any = AutoModelForCausalLM.from_pretrained
        self.model: Any = load(tiny_model(kind), dtype=dtype, attn_implementation=attention).eval()

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        """The answer's tokens, greedy; with what else `generate` is told."""
        ids = torch.tensor([list(prompt)])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        generated: list[int] = output[0, len(prompt) :].tolist()
        return generated

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """After each of some tokens, float32 `[tokens, vocab_size]`."""
        logits: torch.Tensor = self.model(input_ids=torch.tensor([list(token_ids)])).logits[0].float()
        return logits
