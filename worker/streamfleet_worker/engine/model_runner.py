"""The only file that runs a forward pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine import attention
from streamfleet_worker.engine.batch import Batch
from streamfleet_worker.engine.graphs import DecodeGraphs

if TYPE_CHECKING:
    from streamfleet_worker.engine.kv_cache import KVCache
    from streamfleet_worker.engine.models import LoadedModel

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Difference of logits, relative to the largest, that `check` takes for rounding."""

_CHECKED = ((21, 13), (4, 2), (70, 64))
"""Lengths of the prompts that `check` runs, and where each is cut into two chunks."""


class ModelRunner:
    """A model, run over ragged passes.

    Args:
        loaded: the model; from here on its attention is ours.
        granule: tokens of a pass, and rows given to the output head, are rounded up to a multiple of this.
            Matrix kernels choose their way by the number of rows; see `exactness`.
        graphs: on a GPU, record decode passes and replay them.
    """

    def __init__(self, loaded: LoadedModel, *, granule: int = 1, graphs: bool = False) -> None:
        attention.register()
        self._model: Any = loaded.model
        self._own_attention = loaded.attention
        self._model.set_attn_implementation(attention.NAME)
        self._body: Any = self._model.base_model
        self._given = _Given()
        # The model, with a body that gives what it is told: in some models `forward` does more with hidden
        # states than to apply the output layer.
        self._head = copy.copy(self._model)
        self._head._modules = {**self._model._modules, self._model.base_model_prefix: self._given}  # noqa: SLF001
        self._device = loaded.device
        self._dtype = loaded.dtype
        # A mask of four dimensions is passed on as it is, so the model makes none of its own.
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=loaded.dtype, device=loaded.device)
        self._max_position = loaded.max_positions - 1
        self.vocab_size = loaded.vocab_size
        self.granule = granule
        self._graphs = DecodeGraphs(self._compute) if graphs and loaded.device.type == "cuda" else None

    @property
    def records(self) -> bool:
        """Whether decode passes are recorded ones; they are padded otherwise than `granule` says."""
        return self._graphs is not None

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Compute a pass, and store its keys and values.

        Returns:
            The last hidden states of its tokens, `[tokens, hidden_size]`.
        """
        hidden = None if self._graphs is None else self._graphs.run(batch)
        if hidden is None:
            count = len(batch.token_ids)
            padding = -count % self.granule
            ids = self._tensor([*batch.token_ids, *[0] * padding])
            positions = self._tensor([*batch.positions, *[0] * padding])
            hidden = self._compute(ids, positions, batch)[:count]
        return hidden

    def _compute(self, ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        output = self._body(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            batch=batch,
        )
        self._given.kind = type(output)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        """Logits of the next token after some places of a pass, float32 `[places, vocab_size]`."""
        padding = -len(places) % self.granule
        chosen = self._tensor([*places, *[0] * padding])
        self._given.hidden = hidden[chosen][None]
        output = self._head(input_ids=chosen[None], attention_mask=self._no_mask, use_cache=False)
        logits: torch.Tensor = output.logits[0, : len(places)].float()
        return logits

    @torch.inference_mode()
    def check(self, cache: KVCache) -> None:
        """Compare rows of unlike lengths, in one pass over the cache, with the model by itself.

        Raises:
            ModelLoadFailed: the numbers differ by more than rounding explains. The model then derives
                positions or masks in a way of its own.
        """
        kind = type(self._model).__name__
        longest = min(cache.arenas[-1].width, self._max_position + 1)
        lengths = [(n, cut) for n, cut in _CHECKED if n <= longest] or [(2, 1)]
        prompts = [[(7 * i + 3) % self.vocab_size for i in range(n)] for n, _ in lengths]
        try:
            ours = self._in_cache(cache, prompts, [cut for _, cut in lengths])
            alone = self._alone(prompts)
        except Exception as error:
            raise ModelLoadFailed(f"{kind} cannot be batched here: {error}"[:1000]) from error
        for row, expected in zip(ours, alone, strict=True):
            difference = float((row - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
            if not difference < _TOLERANCE[self._dtype]:
                raise ModelLoadFailed(
                    f"{kind} cannot be batched here: it gives other logits in a batch than alone "
                    f"(relative difference {difference:.2g})"
                )

    def _in_cache(self, cache: KVCache, prompts: list[list[int]], cuts: list[int]) -> torch.Tensor:
        """Logits after each prompt: its first part and the rest as two chunks, the last token as decoded."""
        slots = [cache.take(len(prompt)) for prompt in prompts]
        try:
            for starts, ends in ([0] * len(cuts), cuts), (cuts, [len(p) - 1 for p in prompts]):
                batch = Batch()
                for slot, prompt, start, end in zip(slots, prompts, starts, ends, strict=True):
                    if start < end:
                        batch.prefill(slot, start, prompt[start:end])
                if batch.token_ids:
                    self.run(batch)
                    self._check_windows(batch)
            for slot in slots:
                cache.start_decoding(slot)
            batch, places = Batch(), {}
            for arena in cache.arenas:
                mine = {slot.row: i for i, slot in enumerate(slots) if slot.arena is arena}
                if mine:
                    order = [mine[row] for row in sorted(mine)]
                    places.update({i: len(batch.token_ids) + at for at, i in enumerate(order)})
                    batch.decode(arena, [prompts[i][-1] for i in order], [len(prompts[i]) - 1 for i in order])
            return self.logits(self.run(batch), [places[i] for i in range(len(prompts))])
        finally:
            for slot in slots:
                cache.free(slot)

    def _check_windows(self, batch: Batch) -> None:
        """That attention was told of every window: some models only put it into the mask they make."""
        told = {window for _, _, _, window in batch.masks}
        for layer in DynamicCache(config=self._model.config).layers:
            window = getattr(layer, "sliding_window", None)
            if window is not None and window <= self._max_position and window not in told:
                raise ValueError(f"it limits attention to {window} tokens in a way of its own")

    @torch.inference_mode()
    def _alone(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        self._model.set_attn_implementation(self._own_attention)
        try:
            ids = [torch.tensor([prompt], device=self._device) for prompt in prompts]
            masks = [torch.ones_like(i) for i in ids]
            return [
                self._model(input_ids=i, attention_mask=mask, use_cache=False).logits[0, -1].float()
                for i, mask in zip(ids, masks, strict=True)
            ]
        finally:
            self._model.set_attn_implementation(attention.NAME)

    @torch.inference_mode()
    def probe(self) -> None:
        """Run one token through the model, away from the cache; raises whatever it raises."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        self._model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.tensor(values, device=self._device)
        # From pinned memory the copy runs behind what the GPU does already.
        return torch.tensor(values, pin_memory=True).to(self._device, non_blocking=True)


class _Given(nn.Module):
    """Stands for the body of a model: gives the hidden states it was told."""

    hidden: torch.Tensor
    kind: type[ModelOutput] = BaseModelOutputWithPast
    """What the body gives its states in; some heads ask for more of it."""

    def forward(self, *_: Any, **__: Any) -> ModelOutput:
        return self.kind(last_hidden_state=self.hidden)
