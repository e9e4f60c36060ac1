"""Runs an encoder: rows of tokens to a vector, or the scores of labels, for each."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from streamfleet_common.errors import GenerationFailed
from streamfleet_worker.engine.item import Computed, Done, ItemBatch, Outcome
from streamfleet_worker.engine.memory import peak_bytes

if TYPE_CHECKING:
    from streamfleet_worker.engine.encoder_input import Row
    from streamfleet_worker.engine.encoder_model import EncoderModel

log = logging.getLogger(__name__)

LOGITS = "logits"
"""The group of rows whose results are the scores of labels. Of others it is their pooling."""

_ALIGNED = 1 << 14
"""Numbers by which buffers grow."""


class EncoderRunner:
    """Runs batches of rows, each a pair of ids and token types; belongs to the engine's thread.

    A row's result is float32 on the CPU: `[hidden]`, pooled as its group says, or `[labels]`. A row whose
    result has a number that is none fails alone.

    Args:
        encoder: what runs.
        granule: batches are filled up to a multiple of so many rows.
    """

    slots = 1
    ahead = 0

    def __init__(self, encoder: EncoderModel, granule: int = 1) -> None:
        self.granule = granule
        self._encoder = encoder
        self._model = encoder.model
        takes = inspect.signature(encoder.model.forward).parameters
        types = getattr(encoder.model.config, "type_vocab_size", 0)
        self._has_types = "token_type_ids" in takes and types > 1 and encoder.tokenizer.tells_types
        self._is_pinned = encoder.device.type == "cuda"
        self._staging = torch.empty(0, dtype=torch.long)
        self._device = self._staging
        self._peak = 0

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes taken now by weights, by what the model reads, by what that is copied from; and the peak."""
        return {
            "weights": self._encoder.weights_bytes,
            "buffers": self._device.nbytes,
            "staging": self._staging.nbytes if self._is_pinned else 0,
            "peak": self._peak,
        }

    def launch(self, batch: ItemBatch) -> Computed:
        """Begin a batch. Going on with it raises whatever the model does."""
        return Computed(partial(self._outcomes, batch))

    def listen(self, wake: Callable[[], None]) -> None:
        """Nothing runs elsewhere."""

    def is_broken(self) -> bool:
        """Whether the model fails on anything: two tokens of its own choice."""
        try:
            group = LOGITS if self._encoder.labels else self._encoder.pooling
            return not bool(self.run([_probe(2)], group, 2).isfinite().all())
        except Exception:
            log.exception("the model fails on any input")
            return True

    def close(self) -> None:
        """Free the buffers, and the model unless somebody else holds it."""
        self._staging = self._device = torch.empty(0, dtype=torch.long)
        self._model = None

    def preload(
        self,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        max_seq_len: int,
        length_step: int,
        limit_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> int:
        """Run a batch of each length, so that kernels and memory are there when the first request comes.

        On a GPU also a full one of each, which settles what memory is taken. A CPU gains nothing by these:
        with MiniLM only the very first batch was slower than others of its shape, by 10 to 20 ms.

        Args:
            max_batch_size: rows in a batch.
            max_batch_tokens: tokens in one; what takes more is left out.
            max_seq_len: the longest row, in tokens.
            length_step: lengths are multiples of it.
            limit_s: no further batch is begun after that.
            clock: seconds.

        Returns:
            How many batches were run.
        """
        until = clock() + limit_s
        group = LOGITS if self._encoder.labels else self._encoder.pooling
        done = 0
        most = max_batch_size if self._is_pinned else 1
        for rows, length in _shapes(max_seq_len, length_step, most, max_batch_tokens):
            if clock() >= until:
                log.info("%d shapes of batches are ready, longer ones will be once they are needed", done)
                break
            self.run([_probe(min(length, max_seq_len))] * rows, group, length)
            done += 1
        return done

    def run(self, rows: Sequence[Row], group: str, length: int) -> torch.Tensor:
        """Results, `[rows, size]` float32 on the CPU.

        Args:
            rows: ids and token types of each.
            group: the pooling of all, or `LOGITS`.
            length: what they are filled up to, in tokens.
        """
        count = len(rows)
        length = min(length, self._encoder.max_positions)
        with torch.inference_mode():
            ids, mask, types = self._stage(rows, length)
            inputs = {"input_ids": ids, "attention_mask": mask}
            if self._has_types:
                inputs["token_type_ids"] = types
            output = self._model(**inputs)
            results = output.logits if group == LOGITS else _pool(output.last_hidden_state, mask, group)
            # The one place where a GPU is waited for.
            on_cpu: torch.Tensor = results[:count].float().cpu()
        self._peak = peak_bytes(self._encoder.device)
        return on_cpu

    def _outcomes(self, batch: ItemBatch) -> list[Outcome]:
        results = self.run(batch.values, str(batch.group), batch.length)
        good = results.isfinite().all(1).tolist()
        # Copies, since a result may be kept for long after its batch.
        return [
            Done(row.clone())
            if is_good
            else GenerationFailed("the model gives no usable numbers (NaN or infinity)")
            for row, is_good in zip(results, good, strict=True)
        ]

    def _stage(self, rows: Sequence[Row], length: int) -> torch.Tensor:
        """Ids, mask and token types where the model is, `[3, rows, length]`; in buffers used again."""
        count = -(-len(rows) // self.granule) * self.granule
        size = 3 * count * length
        self._make_room(size)
        staged = self._staging[:size].view(3, count, length)
        ids, mask, types = staged.numpy()
        ids.fill(self._encoder.pad_token_id)
        staged[1:].zero_()
        for place, (row_ids, row_types) in enumerate(rows):
            end = len(row_ids)
            ids[place, :end] = row_ids
            mask[place, :end] = 1
            types[place, :end] = row_types
        # A row of which nothing may be seen gives no numbers, and some models fail on it.
        mask[len(rows) :, 0] = 1
        if not self._is_pinned:
            return staged.to(self._encoder.device)
        self._device[:size].copy_(self._staging[:size], non_blocking=True)
        return self._device[:size].view(3, count, length)

    def _make_room(self, size: int) -> None:
        if size > self._staging.numel():
            room = -(-size // _ALIGNED) * _ALIGNED
            self._staging = torch.empty(room, dtype=torch.long, pin_memory=self._is_pinned)
            if self._is_pinned:
                self._device = torch.empty(room, dtype=torch.long, device=self._encoder.device)
            else:
                self._device = self._staging


def _pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """What stands for each row: its first vector, its last, or the mean in float32; `[rows, hidden]`."""
    if pooling == "cls":
        return hidden[:, 0]
    lengths = mask.sum(1)
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    kept = hidden.float().masked_fill(mask[..., None] == 0, 0.0)
    return kept.sum(1) / lengths[:, None]


def _probe(length: int) -> Row:
    # Neither is padding in any model, whatever their meaning.
    return [5, *[6] * (length - 1)], [0] * length


def _shapes(longest: int, step: int, max_rows: int, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Rows and length of batches, the shortest first."""
    for length in range(step, longest + step, step):
        full = min(max_rows, max_tokens // length)
        if full:
            yield from ((rows, length) for rows in sorted({1, full}))
