"""One forward pass over sequences: builds it, runs it, samples from it. It changes no sequence."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamfleet_worker.engine import sampler
from streamfleet_worker.engine.batch import Batch
from streamfleet_worker.engine.sequence import Scores

if TYPE_CHECKING:
    import torch

    from streamfleet_common.errors import StreamfleetError
    from streamfleet_worker.engine.kv_cache import Arena, KVCache, Slot
    from streamfleet_worker.engine.model_runner import ModelRunner
    from streamfleet_worker.engine.scheduler import Chunk
    from streamfleet_worker.engine.sequence import Sequence

SCORED_AT_ONCE = 256
"""Prompt tokens whose logits are held at once when prompts are scored."""


@dataclass(slots=True)
class Outcome:
    """What a pass brought forth."""

    tokens: list[tuple[Sequence, sampler.Sampled | StreamfleetError]] = field(default_factory=list)
    """The next token of every sequence that gets one, or why it cannot have it."""
    scores: list[tuple[Sequence, Scores]] = field(default_factory=list)


class Forward:
    """Passes of one model over one cache."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        self._runner = runner
        self._cache = cache

    def run(self, decodes: List[Sequence], chunks: List[Chunk]) -> Outcome:
        """Compute the last token of each of `decodes`, and chunks of prompts.

        May be run again with any part of the same: what it stores it stores in the same places.
        """
        batch = Batch()
        sampled, places = self._decode(batch, decodes)
        starts = []
        for chunk in chunks:
            sequence = chunk.sequence
            starts.append(len(batch.token_ids))
            batch.prefill(
                _slot(sequence), chunk.start, list(sequence.prompt_token_ids[chunk.start : chunk.end])
            )
            if chunk.end == sequence.prompt_length and sequence.max_tokens:
                sampled.append(sequence)
                places.append(len(batch.token_ids) - 1)
        hidden = self._runner.run(batch)
        outcome = Outcome()
        if sampled:
            logits = self._runner.logits(hidden, places)
            found = sampler.sample(logits, [sequence.row for sequence in sampled])
            outcome.tokens = list(zip(sampled, found, strict=True))
        outcome.scores = self._score(hidden, chunks, starts)
        return outcome

    def _decode(self, batch: Batch, decodes: List[Sequence]) -> tuple[list[Sequence], list[int]]:
        """Add their tokens, arena by arena; gives them in the order of the pass, and their places in it."""
        by_arena: dict[Arena, list[Sequence]] = {}
        for sequence in decodes:
            by_arena.setdefault(_slot(sequence).arena, []).append(sequence)
        order: list[Sequence] = []
        for arena, sequences in by_arena.items():
            sequences.sort(key=_row)
            whole = len(sequences) == arena.decoding
            batch.decode(
                arena,
                [sequence.token_ids[-1] for sequence in sequences],
                [sequence.position for sequence in sequences],
                None if whole else [_row(sequence) for sequence in sequences],
            )
            order += sequences
        return order, list(range(len(order)))

    def _score(
        self, hidden: torch.Tensor, chunks: List[Chunk], starts: List[int]
    ) -> list[tuple[Sequence, Scores]]:
        """Scores of all prompts of the pass, as many places at once as may be, whoever they belong to."""
        found: list[tuple[Sequence, Scores]] = []
        asked: list[tuple[int, int, Sequence, Scores]] = []
        for chunk, start in zip(chunks, starts, strict=True):
            sequence, first = chunk.sequence, start - chunk.start
            if sequence.scored_from > chunk.end:
                continue
            scores = Scores()
            found.append((sequence, scores))
            ids = sequence.prompt_token_ids
            # A token's score comes from the place before it; behind the last one there are candidates only.
            places = range(max(chunk.start, sequence.scored_from - 1), min(chunk.end, len(ids) - 1))
            asked += [(first + place, ids[place + 1], sequence, scores) for place in places]
            if chunk.end == len(ids):
                last = first + len(ids) - 1
                asked += [(last, token_id, sequence, scores) for token_id in sequence.prepared.candidates]
        for begin in range(0, len(asked), SCORED_AT_ONCE):
            at, token_ids, sequences, scored = zip(*asked[begin : begin + SCORED_AT_ONCE], strict=True)
            rows = {place: row for row, place in enumerate(dict.fromkeys(at))}
            logits = self._runner.logits(hidden, list(rows))
            if len(rows) < len(at):
                logits = logits[[rows[place] for place in at]]
            tops = [sequence.prepared.top_logprobs for sequence in sequences]
            lines = zip(*sampler.score(logits, token_ids, max(tops)), tops, scored, strict=True)
            for logprob, likeliest, top, scores in lines:
                scores.logprobs.append(logprob)
                scores.top.append(likeliest[:top])
        return found


def _slot(sequence: Sequence) -> Slot:
    if sequence.slot is None:
        raise RuntimeError("a sequence without a row in the cache cannot be computed")
    return sequence.slot


def _row(sequence: Sequence) -> int:
    return _slot(sequence).row
