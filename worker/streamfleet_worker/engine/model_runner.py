"""The only file that runs a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine.kv_cache import (
    ChunkWindow,
    DecodeWindow,
    PrefillWindow,
    SlotCache,
)
from streamfleet_worker.engine.scheduler import Move, padded

if TYPE_CHECKING:
    from streamfleet_worker.engine.models import LoadedModel

ROW_GRANULE = 8
"""Decode rows are rounded up to a multiple of this: CPU matrix kernels choose their path by the number of
rows, and with this many they compute a row alike, alone and in any company."""

SPAN_BUCKET = 64
"""Attention looks at a multiple of this many cached tokens: enough for the longest running row, and not
at the whole slot."""

SCORE_CHUNK = 256
"""Prompt tokens whose logits are held at once when a prompt's log-probabilities are asked for."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Difference of logits, relative to the largest, that `check` takes for rounding."""


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


class ModelRunner:
    """A model and its slot cache.

    A prompt is prefilled up to its last token, which then takes part in the next decode pass as any
    generated token does: so all logits that are sampled come from decode passes of fixed row counts.

    Args:
        loaded: the model.
        max_batch_size: rows that run at once.
        max_len: tokens a row may grow to, prompt included.
    """

    def __init__(self, loaded: LoadedModel, *, max_batch_size: int, max_len: int) -> None:
        self._model: Any = loaded.model
        # The layers without the output head: prefill needs no logits.
        self._layers: Any = loaded.model.base_model
        self._max_len = max_len
        self._device = loaded.device
        self._dtype = loaded.dtype
        self.vocab_size = loaded.vocab_size
        self.cache = SlotCache(
            loaded.layer_shapes,
            _round_up(max_batch_size, ROW_GRANULE),
            _round_up(max_len, SPAN_BUCKET),
            dtype=loaded.dtype,
            device=loaded.device,
        )

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Fill slots with all but the last token of their prompts, which must share one padded length."""
        length = padded(max(map(len, prompts)) - 1)
        if not length:
            return
        ids = [[*prompt[:-1], *[0] * (length - len(prompt) + 1)] for prompt in prompts]
        # Padding may reach past the last position the model knows; what it computes there is void.
        positions = torch.arange(length, device=self._device).clamp_(max=self._max_len - 1)
        window = PrefillWindow(torch.tensor(list(slots), device=self._device), length)
        # Rows are padded on the right, where the causal mask hides the padding from every real token: no
        # mask of ours is needed, and what the padding leaves in the slot is overwritten token by token.
        self._run(
            self._layers,
            window,
            input_ids=torch.tensor(ids, device=self._device),
            position_ids=positions.expand(len(ids), -1),
            attention_mask=None,
        )

    @torch.inference_mode()
    def prefill_scored(self, slot: int, prompt: Sequence[int]) -> list[float]:
        """Fill one slot, and give the log-probabilities of the prompt's tokens from the second on."""
        logprobs: list[float] = []
        for start in range(0, len(prompt) - 1, SCORE_CHUNK):
            chunk = prompt[start : min(start + SCORE_CHUNK, len(prompt) - 1)]
            end = start + len(chunk)
            positions = torch.arange(start, end, device=self._device)
            seen = torch.arange(end, device=self._device)
            output = self._run(
                self._model,
                ChunkWindow(slot, start, len(chunk)),
                input_ids=torch.tensor([chunk], device=self._device),
                position_ids=positions[None],
                attention_mask=self._mask(seen[None, None, None] <= positions[None, None, :, None]),
            )
            targets = torch.tensor(prompt[start + 1 : end + 1], device=self._device)
            scores = torch.log_softmax(output.logits[0].float(), dim=-1)
            logprobs += scores.gather(1, targets[:, None])[:, 0].tolist()
        return logprobs

    @torch.inference_mode()
    def decode(
        self, token_ids: Sequence[int], positions: Sequence[int], only_slot: int | None = None
    ) -> torch.Tensor:
        """Feed one token to each of the slots from 0 on, or a single one to `only_slot`.

        Returns:
            Logits of the next tokens, float32, `[len(token_ids), vocab_size]`.
        """
        # Idle rows feed token 0 to place 0 of slots nobody owns; a prefill overwrites it. After a single
        # slot come some with owners: it runs without idle rows.
        first = only_slot or 0
        rows = _round_up(len(token_ids), ROW_GRANULE) if only_slot is None else 1
        idle = rows - len(token_ids)
        ids = torch.tensor([*token_ids, *[0] * idle], device=self._device)
        where = torch.tensor([*positions, *[0] * idle], device=self._device)
        span = min(_round_up(max(positions) + 1, SPAN_BUCKET), self.cache.max_len)
        places = torch.arange(span, device=self._device)
        index = torch.arange(rows, device=self._device)
        output = self._run(
            self._model,
            DecodeWindow(first, rows, where, index, span),
            input_ids=ids[:, None],
            position_ids=where[:, None],
            attention_mask=self._mask(places[None, None, None] <= where[:, None, None, None]),
        )
        logits: torch.Tensor = output.logits[: len(token_ids), -1].float()
        return logits

    @torch.inference_mode()
    def check(self) -> None:
        """Compare two rows of unlike length, batched in the cache, with the model by itself.

        Uses slots 0 and 1, so nothing may be running.

        Raises:
            ModelLoadFailed: the numbers differ by more than rounding explains. The model then derives
                positions or masks in a way of its own.
        """
        kind = type(self._model).__name__
        prompts = [[(7 * i + 3) % self.vocab_size for i in range(n)] for n in (21, 4)]
        try:
            self.prefill(range(len(prompts)), prompts)
            ours = self.decode([p[-1] for p in prompts], [len(p) - 1 for p in prompts])
            ids = [torch.tensor([prompt], device=self._device) for prompt in prompts]
            alone = [self._model(input_ids=i, use_cache=False).logits[0, -1].float() for i in ids]
        except Exception as error:
            raise ModelLoadFailed(f"{kind} cannot be batched here: {error}"[:1000]) from error
        for row, expected in zip(ours, alone, strict=True):
            difference = float((row - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
            if not difference < _TOLERANCE[self._dtype]:
                raise ModelLoadFailed(
                    f"{kind} cannot be batched here: it gives other logits in a batch than alone "
                    f"(relative difference {difference:.2g})"
                )

    @torch.inference_mode()
    def probe(self) -> None:
        """Run one token through the model, away from the cache; raises whatever it raises."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        self._model(input_ids=ids, use_cache=False)

    def move(self, move: Move) -> None:
        """Let a row's cache move to another slot."""
        if move.length:
            self.cache.move(move.source, move.target, move.length)

    def clear(self, slot: int) -> None:
        """Forget what a slot holds, after its row has failed."""
        self.cache.clear(slot)

    def _run(self, part: Any, window: Any, **inputs: Any) -> Any:
        self.cache.open(window)
        try:
            return part(cache=self.cache, use_cache=True, **inputs)
        finally:
            self.cache.open(None)

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """An additive mask, `[rows or 1, 1, queries, keys]`: made once, not once a layer."""
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~visible, float("-inf"))
