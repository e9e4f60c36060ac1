"""A model runner that does as a test says: chosen tokens, passes that raise, memory that runs out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from streamfleet_worker.engine.batch import Batch
from streamfleet_worker.engine.model_runner import ModelRunner
from streamfleet_worker.engine.models import LoadedModel


class ScriptedRunner(ModelRunner):
    """The model's runner, except for what the script says of tokens, wherever they stand.

    After a token that is a key of `follows` comes its value; so each answer has a story of its own, in any
    company. After a place that is a key of `at` comes its value, whatever stands there. A pass with a token
    of `fatal` breaks, and one of more than `room` tokens finds no memory.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        follows: Mapping[int, int] | None = None,
        at: Mapping[int, int] | None = None,
        fatal: Collection[int] = (),
        room: int | None = None,
        exhausted: Callable[[], Exception] = torch.OutOfMemoryError,
        **options: Any,
    ) -> None:
        super().__init__(loaded, **options)
        self.follows = dict(follows or {})
        self.at = dict(at or {})
        self.fatal = frozenset(fatal)
        self.room = room
        self.passes: list[list[int]] = []
        """Tokens of every pass that was tried."""
        self._exhausted = exhausted
        self._token_ids: list[int] = []
        self._positions: list[int] = []

    def run(self, batch: Batch) -> torch.Tensor:
        self._token_ids, self._positions = list(batch.token_ids), list(batch.positions)
        self.passes.append(self._token_ids)
        if self.fatal.intersection(self._token_ids):
            raise RuntimeError("the pass broke")
        if self.room is not None and len(self._token_ids) > self.room:
            raise self._exhausted()
        return super().run(batch)

    def logits(self, hidden: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        logits = super().logits(hidden, places)
        for row, place in zip(logits, places, strict=True):
            following = self.follows.get(self._token_ids[place], self.at.get(self._positions[place]))
            if following is not None and bool(row.isfinite().all()):
                row.zero_()
                row[following] = 9.0
        return logits


class BrokenRunner(ScriptedRunner):
    """A model that fails on anything, once it is told to."""

    broken = False

    def run(self, batch: Batch) -> torch.Tensor:
        self._break()
        return super().run(batch)

    def probe(self) -> None:
        self._break()
        super().probe()

    def _break(self) -> None:
        if self.broken:
            raise RuntimeError("the device is gone")


def poisoned(loaded: LoadedModel, token_id: int) -> LoadedModel:
    """The model with NaN for an embedding: whatever reads the token becomes NaN, in all layers."""
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[token_id] = torch.nan
    return replace(loaded, model=model)
