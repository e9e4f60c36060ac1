"""The sides of `one_shot.py` that run in our environment, each in a process of its own.

    python one_shot_sides.py {alone,naive,ours,exact} SETUP

`alone` and `naive` are transformers' model as its card says to use it: tokens' vectors, their mean, length 1;
for each text by itself, and for batches as the texts arrive, padded to their longest. `ours` is the engine in
process, given all texts as one request, with `exact` off; `exact` is the same with it on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from one_shot_side import Setup, Side, Vectors, own_cpu_seconds, serve
from streamfleet_common.one_shot import EmbedRequest
from streamfleet_worker.engine import devices
from streamfleet_worker.engine.local import load


class Plain:
    """transformers, for so many texts at a time."""

    def __init__(self, folder: str, precision: str, batch: int) -> None:
        self._batch = batch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder, dtype=getattr(torch, precision)).eval()

    def embed(self, texts: Sequence[str]) -> Vectors:
        parts = [texts[at : at + self._batch] for at in range(0, len(texts), self._batch)]
        return [vector for part in parts for vector in self._vectors(part)]

    @torch.inference_mode()
    def _vectors(self, texts: Sequence[str]) -> list[list[float]]:
        tokens = self.tokenizer(list(texts), padding=True, return_tensors="pt")
        hidden = self._model(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        found: list[list[float]] = torch.nn.functional.normalize(mean).tolist()
        return found

    def cpu_seconds(self) -> dict[str, float]:
        return own_cpu_seconds()


class Ours:
    """The engine in process."""

    def __init__(self, setup: Setup, *, exact: bool) -> None:
        self._model = load(
            setup.model,
            "cpu",
            setup.precision,
            threads=setup.threads,
            max_batch_size=setup.batch,
            exact=exact,
        )

    def embed(self, texts: Sequence[str]) -> Vectors:
        return [embedding.vector for embedding in self._model.run(EmbedRequest(texts=texts)).embeddings]

    def cpu_seconds(self) -> dict[str, float]:
        return own_cpu_seconds()


def plain(setup: Setup, *, batch: int) -> Plain:
    """Loaded as the others are."""
    devices.set_threads(setup.threads)
    return Plain(setup.folder, setup.precision, batch)


SIDES: dict[str, Callable[[Setup], Side]] = {
    "alone": partial(plain, batch=1),
    "naive": lambda setup: plain(setup, batch=setup.batch),
    "ours": partial(Ours, exact=False),
    "exact": partial(Ours, exact=True),
}

if __name__ == "__main__":
    name, where = sys.argv[1:]
    serve(SIDES[name], Setup.read(Path(where)))
