"""Random walks over the tokens that a guide allows: answers of a model that knows nothing."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import torch

from streamfleet_worker.engine.guide import Guide, Matcher
from streamfleet_worker.engine.tokenizer import Tokenizer

MAX_TOKENS = 4000
HURRY = 60
"""Tokens after which a walk takes what closes strings, lists and objects wherever it may."""


class Place:
    """Whether a JSON document is within a string."""

    def __init__(self) -> None:
        self.in_string = self.escaped = False

    def push(self, text: str) -> None:
        for char in text:
            if char == '"' and not self.escaped:
                self.in_string = not self.in_string
            self.escaped = char == "\\" and not self.escaped

    @property
    def closers(self) -> str:
        return '"' if self.in_string else "}]"


def allowed(matcher: Matcher, vocab_size: int) -> list[int]:
    """The tokens that may come next."""
    mask = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
    matcher.fill(mask)
    bits = mask[:, None] >> torch.arange(32) & 1
    found: list[int] = bits.flatten().nonzero().flatten().tolist()
    return found


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of an answer, as it is shown behind a prompt."""
    decoder = tokenizer.decoder([next(i for i in range(10_000) if tokenizer.decode([i]).strip())])
    return "".join(map(decoder.push, token_ids)) + decoder.flush()


def walk(
    guide: Guide, tokenizer: Tokenizer, vocab_size: int, ends: Collection[int], seed: int
) -> tuple[list[int], str]:
    """The tokens of a random answer, without the end, and its text.

    Every token is one that the guide allowed. The walk ends at an end token.
    """
    chance = random.Random(seed)
    matcher = guide.matcher()
    answer: list[int] = []
    place = Place()
    closers = {closer: tokenizer.encode_piece(closer)[-1] for closer in '"}]'}
    while len(answer) < MAX_TOKENS:
        tokens = allowed(matcher, vocab_size)
        assert tokens, f"nothing is allowed behind {text_of(tokenizer, answer)!r}"
        token_id = chance.choice(tokens)
        if len(answer) > HURRY:
            wanted = [*sorted(ends), *(closers[closer] for closer in place.closers)]
            token_id = next((i for i in wanted if i in tokens), token_id)
        matcher.accept(token_id)
        if token_id in ends:
            return answer, text_of(tokenizer, answer)
        answer.append(token_id)
        place.push(tokenizer.decode([token_id]))
    raise AssertionError(f"no end within {MAX_TOKENS} tokens: {text_of(tokenizer, answer)[:500]!r}")
