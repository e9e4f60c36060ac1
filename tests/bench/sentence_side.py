"""sentence-transformers' `encode` as a side of `one_shot.py`; run by the Python of its own environment.

    python sentence_side.py SETUP

It sorts the texts by length itself. Same torch, same transformers and as many threads as the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from one_shot_side import Setup, Vectors, own_cpu_seconds, serve


class SentenceSide:
    """The library."""

    def __init__(self, setup: Setup) -> None:
        # Seconds of imports, and the variable has to be set by then.
        import torch  # noqa: PLC0415
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415

        torch.set_num_threads(setup.threads)
        self._batch = setup.batch
        self._model = SentenceTransformer(
            setup.folder, device="cpu", model_kwargs={"dtype": getattr(torch, setup.precision)}
        )

    def embed(self, texts: Sequence[str]) -> Vectors:
        found: Vectors = self._model.encode(
            list(texts), batch_size=self._batch, normalize_embeddings=True, show_progress_bar=False
        )
        return found

    def cpu_seconds(self) -> dict[str, float]:
        return own_cpu_seconds()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    serve(SentenceSide, Setup.read(Path(sys.argv[1])))
