"""Whether a text gets the same bits alone and in any batch, found out by trying; see `exactness`.

Rows of a batch are all of one rounded length then, so that a row is filled up alike whoever is with it. What
is left are kernels that choose their way by the number of rows: the linear layers are tried with many, and
then the whole way from tokens to results, with several numbers of rows of several lengths.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from streamfleet_worker.engine.encoder_runner import LOGITS
from streamfleet_worker.engine.exactness import GRANULES, is_hopeless, odd_rows, worker_class

if TYPE_CHECKING:
    from streamfleet_worker.engine.encoder_input import Row
    from streamfleet_worker.engine.encoder_model import EncoderModel
    from streamfleet_worker.engine.encoder_runner import EncoderRunner

log = logging.getLogger(__name__)

LENGTH_STEP = 8
"""To a multiple of so many tokens lengths are rounded up, whether answers are exact or not. For 256 texts of
30 tokens in the mean MiniLM takes with 8 about 0.82 of the time that it takes with 32, with 16 0.89, in
float32 as in bfloat16, on one core; with exact batches, which are smaller, the gain is greater still."""

_BLOCKS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 21, 32, 47, 64, 128, 256)
"""In so many steps of tokens linear layers are tried."""
_ROWS = (1, 2, 3, 5, 8, 32)
_PASS_TOKENS = 1024
"""More are not tried at once: a model should be ready within seconds."""


@dataclass(frozen=True, slots=True)
class EncoderExactness:
    """What was found."""

    granule: int
    """Batches are filled up to a multiple of so many rows."""
    name: str
    """The class of workers that give the same bits; "" if not even this one does."""

    @classmethod
    def find(
        cls, encoder: EncoderModel, runner: EncoderRunner, *, max_batch_size: int, max_seq_len: int
    ) -> EncoderExactness:
        """Try the model; leaves the runner with the granule that was found.

        Args:
            encoder: the model.
            runner: runs it; nothing may be running.
            max_batch_size: rows in a batch.
            max_seq_len: the longest row, in tokens.
        """
        with torch.inference_mode():
            # A GPU's kernels are chosen by numbers of rows that are too many to be tried.
            hopeless = encoder.device.type != "cpu" or is_hopeless(encoder)
            odd = set() if hopeless else odd_rows(encoder, [LENGTH_STEP * blocks for blocks in _BLOCKS])
            for granule in () if hopeless else GRANULES:
                if any(rows % (granule * LENGTH_STEP) == 0 for rows in odd):
                    continue
                runner.granule = granule
                if _holds(encoder, runner, max_batch_size, max_seq_len):
                    name = worker_class(encoder, granule, np.__version__)
                    log.info("answers are exact among workers of class %s", name)
                    return cls(granule, name)
        runner.granule = 1
        log.warning(
            "answers are not exact: on %s in %s a text's numbers depend on its company",
            encoder.device_name,
            encoder.precision,
        )
        return cls(1, "")


def _holds(encoder: EncoderModel, runner: EncoderRunner, max_batch_size: int, max_seq_len: int) -> bool:
    """Whether rows of several lengths get the same results alone and in several companies."""
    # The mean is made of all vectors, so it shows what the other poolings would.
    group = LOGITS if encoder.labels else "mean"
    for length in _lengths(max_seq_len):
        source = random.Random(length)
        least, most = length - LENGTH_STEP + 1, min(length, max_seq_len)
        company: list[Row] = [
            _row(source, source.randint(least, most), encoder.vocab_size) for _ in range(max(_ROWS))
        ]
        subjects = [_row(source, tokens, encoder.vocab_size) for tokens in (most, least)]
        alone = [runner.run([subject], group, length) for subject in subjects]
        # Where nothing is masked, models may go another way.
        full = runner.run([subjects[0]] * runner.granule, group, length)
        if not all(torch.equal(one, alone[0][0]) for one in full):
            return False
        for rows in _ROWS:
            if rows > max_batch_size or (rows > 2 and rows * length > _PASS_TOKENS):
                break
            for place, batch in _batches(subjects, company, rows):
                results = runner.run(batch, group, length)
                for number, expected in enumerate(alone):
                    at = place + number
                    if at < rows and not torch.equal(results[at : at + 1], expected):
                        return False
    return True


def _batches(subjects: list[Row], company: list[Row], rows: int) -> Iterator[tuple[int, list[Row]]]:
    """Batches with the subjects at the start and at the end, and the place of the first of them."""
    for place in {0, max(0, rows - len(subjects))}:
        yield place, [*company[:place], *subjects, *company[place:]][:rows]


def _lengths(longest: int) -> list[int]:
    """Some lengths of which rows may be, the longest among them."""
    found, length = [], LENGTH_STEP
    while length < longest:
        found.append(length)
        length *= 2
    return [*found, -(-longest // LENGTH_STEP) * LENGTH_STEP]


def _row(source: random.Random, tokens: int, vocab_size: int) -> Row:
    return [source.randrange(5, vocab_size) for _ in range(tokens)], [0] * tokens
