"""Logits in blocks of tokens, whose maxima lead to the likeliest tokens without sorting the rest."""

from __future__ import annotations

import math

import torch

BLOCK = 64
_FOLDS = 8


class Blocks:
    """Logits of some rows, float32 `[rows, blocks, BLOCK]`, filled up with -inf.

    Args:
        logits: float32, `[rows, vocab_size]`; not copied if the vocabulary fills its blocks.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        short = -logits.shape[-1] % BLOCK
        if short:
            logits = torch.nn.functional.pad(logits, (0, short), value=-math.inf)
        self.values = logits.contiguous().view(len(logits), -1, BLOCK)
        self.maxima = self.values.amax(dim=-1)
        self.best = self.maxima.amax(dim=-1)
        """The largest logit of each row, float32 `[rows]`; NaN if the row holds one."""

    def likeliest(self, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logits of some rows, the best first, and the ids of their tokens.

        Which of several equals at the very end are among them is left open.

        Args:
            rows: int64, `[n]`.
            count: how many.

        Returns:
            float32 and int64, `[n, count]`, or all that there are. Ids past the vocabulary come with -inf.
        """
        count = min(count, self.values[0].numel())
        # Every token above the n-th largest maximum lies in one of the n blocks of the largest.
        blocks = _places(self.maxima[rows], min(count, self.maxima.shape[1]))
        flat = rows[:, None] * self.maxima.shape[1] + blocks
        near = self.values.flatten(0, 1).index_select(0, flat.flatten()).view(len(rows), -1)
        values, places = _largest(near, count)
        ids = blocks.gather(1, places // BLOCK) * BLOCK + places % BLOCK
        return values, ids


def _largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row, the best first, and their places; both `[rows, count]`."""
    width = values.shape[1] // _FOLDS
    if width > count:
        # The same once more, across columns, since whole vectors then meet: half of what one `topk` takes.
        folded = values.view(len(values), _FOLDS, width)
        columns = _places(folded.amax(dim=1), count)
        near, places = _largest(folded.gather(2, columns[:, None].expand(-1, _FOLDS, -1)).flatten(1), count)
        return near, places // count * width + columns.gather(1, places % count)
    places = _places(values, count, in_order=True)
    return values.gather(1, places), places


def _places(values: torch.Tensor, count: int, *, in_order: bool = False) -> torch.Tensor:
    """Where the largest of each row are, int64 `[rows, count]`."""
    # As integers of the same order: a third less than with numbers that may be NaN.
    bits = values.contiguous().view(torch.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).topk(count, sorted=in_order).indices


def moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values of the CPU on the device; neither side waits for the other."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
