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


BFLOAT16_GAP = 4 * 2**-8
"""Two logits in bfloat16 that are as close as this, relative, are the same but for rounding: its numbers have
8 bits, and what comes of a few layers is off by a few units of the last one."""


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

    def gap(self, prompt: Sequence[int], theirs: Sequence[int], ours: Sequence[int]) -> float:
        """How much less likely than its best token the model holds the first one that is another, relative.

        0 if the answers are equal, or part where two of its logits do.
        """
        parted = [place for place, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]]
        if not parted:
            assert len(theirs) == len(ours)
            return 0.0
        logits = self.logits([*prompt, *theirs[: parted[0]]])[-1]
        best = float(logits.max())
        return (best - float(logits[ours[parted[0]]])) / abs(best)
