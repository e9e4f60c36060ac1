"""Requests of all kinds at random, as a service would send them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

WORDS = ("self", " return", "the", "e", " (", "\n", "def", "or", "ing", "s", ".", "0", " if")
"""Text that the tiny models' vocabulary has tokens for."""


class RandomRequests:
    """Fields of generate requests, told by a seed.

    Args:
        seed: of the requests.
        longest: tokens of the longest prompt.
        vocab_size: token ids of prompts are below it.
    """

    def __init__(self, seed: int, *, longest: int = 150, vocab_size: int = 1024) -> None:
        self._source = random.Random(seed)
        self._longest = longest
        self._vocab_size = vocab_size
        # Prompts share beginnings, so that some find theirs computed.
        self._heads = [self._tokens(length) for length in (33, 64, 100)]

    def __call__(self, count: int) -> list[dict[str, Any]]:
        """Some more requests."""
        return [self._one() for _ in range(count)]

    def _one(self) -> dict[str, Any]:
        source = self._source
        ids = self._tokens(source.randint(1, self._longest))
        if source.random() < 0.4:
            ids = (source.choice(self._heads) + ids)[: max(40, len(ids))]
        fields: dict[str, Any] = {
            "prompt_token_ids": ids,
            "max_tokens": source.choice([1, 2, 5, 12, 12, 20, 30]),
            "sampling": self._sampling() if source.random() < 0.65 else {},
            **self._ends(),
            **self._told(),
        }
        if source.random() < 0.2:
            fields["n"] = source.randint(2, 3)
        if source.random() < 0.1:
            fields["truncate"] = source.randint(1, 60)
            fields["truncate_side"] = source.choice(["left", "right"])
        if source.random() < 0.05:
            fields["max_tokens"] = "fit"
        return fields

    def _ends(self) -> dict[str, Any]:
        source, fields = self._source, dict[str, Any]()
        if source.random() < 0.3:
            fields["stop"] = source.sample(WORDS, source.randint(1, 3))
            fields["include_stop"] = source.random() < 0.3
        if source.random() < 0.2:
            fields["stop_token_ids"] = self._tokens(20)
        if source.random() < 0.15:
            fields["ignore_eos"] = True
        if source.random() < 0.15:
            fields["min_tokens"] = 1
        return fields

    def _told(self) -> dict[str, Any]:
        source, fields = self._source, dict[str, Any]()
        if source.random() < 0.4:
            fields["logprobs"] = True
            fields["top_logprobs"] = source.choice([0, 0, 3, 20])
        if source.random() < 0.2:
            fields["prompt_logprobs"] = True
        if source.random() < 0.1:
            fields["echo"] = True
        if source.random() < 0.1:
            fields["skip_special_tokens"] = False
        return fields

    def _sampling(self) -> dict[str, Any]:
        source = self._source
        chances: dict[str, tuple[float, Callable[[], Any]]] = {
            "top_k": (0.3, lambda: source.choice([1, 2, 10, 50, 2000])),
            "top_p": (0.3, lambda: source.choice([0.0, 0.3, 0.9, 0.99, 1.0])),
            "min_p": (0.2, lambda: source.choice([0.02, 0.3, 1.0])),
            "typical_p": (0.2, lambda: source.choice([0.1, 0.7, 1.0])),
            "repetition_penalty": (0.25, lambda: source.choice([0.8, 1.1, 1.5])),
            "presence_penalty": (0.2, lambda: source.choice([-0.5, 0.6])),
            "frequency_penalty": (0.2, lambda: source.choice([-0.2, 0.4])),
            "logit_bias": (0.2, lambda: {i: source.uniform(-3, 3) for i in self._tokens(5)}),
            "bad_words": (0.2, lambda: source.sample(WORDS, 2)),
            "seed": (0.5, lambda: source.randrange(2**40)),
        }
        fields: dict[str, Any] = {
            name: draw() for name, (chance, draw) in chances.items() if source.random() < chance
        }
        if "bad_words" in fields:
            fields["bad_words"] = [word for word in fields["bad_words"] if not word.isspace()]
        return {"temperature": source.choice([0.0, 0.2, 0.8, 1.0, 2.0]), **fields}

    def _tokens(self, count: int) -> list[int]:
        return [self._source.randrange(3, self._vocab_size) for _ in range(count)]


def is_plainly_greedy(fields: dict[str, Any]) -> bool:
    """Whether nothing but the likeliest token is asked for, up to an end of the model's."""
    return not fields["sampling"] and not fields.keys() & {"ignore_eos", "min_tokens", "truncate"}
