"""Embed: texts to vectors."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_common.one_shot import Embedding
from streamfleet_worker.engine.tasks.encoder_job import EncoderJob, check_answer_size

if TYPE_CHECKING:
    import torch

    from streamfleet_common.one_shot import EmbedRequest
    from streamfleet_worker.engine.encoder_input import InputBuilder
    from streamfleet_worker.engine.encoder_model import EncoderModel

Floats = npt.NDArray[np.float32]

LEAST_NORM = 1e-12
"""A vector that is shorter is divided by this: the null vector stays what it is."""


class EmbedTask:
    """The door for texts that are to become vectors.

    Args:
        encoder: what reads them.
        inputs: makes its rows.
    """

    def __init__(self, encoder: EncoderModel, inputs: InputBuilder) -> None:
        self._encoder = encoder
        self._inputs = inputs
        self._dimensions: int = encoder.model.config.hidden_size

    def prepare(self, request: EmbedRequest, scope: str = "") -> EncoderJob:
        """Check a request and turn its texts into tokens.

        Raises:
            TooLong: a text is, and may not be cut.
            Unsupported: the model has labels, and no vectors.
            InvalidRequest: a text has no tokens, more dimensions than there are, more to tell than a result
                holds.
        """
        began = time.perf_counter()
        encoder = self._encoder
        if encoder.head != "embed":
            raise Unsupported(
                f"{encoder.name!r} gives labels, not vectors: send texts to be embedded to a queue whose "
                "workers serve an embedding model",
                feature="embed",
            )
        dimensions = self._dimensions if request.dimensions is None else request.dimensions
        if dimensions > self._dimensions:
            raise InvalidRequest(
                f"dimensions: {dimensions} were asked for, and the vectors of {encoder.name!r} have "
                f"{self._dimensions}",
                limit=self._dimensions,
            )
        check_answer_size(request.n * (16 + 4 * dimensions), "send fewer texts, or ask for fewer dimensions")
        side = request.truncate_side if request.truncate else None
        rows = [
            self._inputs.text(place, f"texts.{place}", text, side, scope)
            for place, text in enumerate(request.texts)
        ]
        normalize = encoder.normalize if request.normalize is None else request.normalize
        make = partial(_answer, dimensions=dimensions, normalize=normalize)
        return EncoderJob.of(rows, request.pooling or encoder.pooling, make, began)


def _answer(results: Sequence[torch.Tensor], *, dimensions: int, normalize: bool) -> Mapping[str, Any]:
    vectors = (vector(result.numpy(), dimensions, normalize=normalize) for result in results)
    # Numbers lie little-endian on the wire.
    return {"embeddings": tuple(Embedding(data=one.astype("<f4", copy=False).tobytes()) for one in vectors)}


def vector(pooled: Floats, dimensions: int, *, normalize: bool) -> Floats:
    """The first numbers of a text's vector, then divided by their length; `[dimensions]` float32.

    Length and division are computed in float64, and the result is rounded to float32 once. By numpy: torch
    takes three times as long for vectors this small.
    """
    cut = pooled[:dimensions]
    if not normalize:
        return cut
    exact = cut.astype(np.float64)
    return (exact / max(math.sqrt(np.square(exact).sum()), LEAST_NORM)).astype(np.float32)
