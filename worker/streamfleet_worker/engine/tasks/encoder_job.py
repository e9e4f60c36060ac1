"""A request to an encoder, ready to run."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamfleet_common.codec import MAX_RESULT_BYTES
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.schemas import Usage

if TYPE_CHECKING:
    import torch

    from streamfleet_worker.engine.encoder_input import EncoderInput
    from streamfleet_worker.engine.item import ItemSpec

REST_BYTES = 8192
"""Of a result, besides what was asked for: usage, timing, memory and names."""

Answer = Callable[[Sequence["torch.Tensor"]], Mapping[str, Any]]
"""Results, `[size]` float32 each, to fields of `Finished`."""


@dataclass(frozen=True, slots=True)
class EncoderJob:
    """A `Job` whose items are rows for an encoder."""

    items: tuple[ItemSpec, ...]
    usage: Usage
    tokenize_s: float
    make: Answer

    @classmethod
    def of(cls, inputs: Sequence[EncoderInput], group: Hashable, make: Answer, began: float) -> EncoderJob:
        """A job of these rows, one an item.

        Args:
            inputs: the rows.
            group: what they may run with.
            make: what becomes of their results.
            began: `time.perf_counter()` when the request came.
        """
        usage = Usage(
            prompt_tokens=sum(len(row.ids) for row in inputs),
            cut_tokens=sum(row.cut_tokens for row in inputs),
            truncated=sum(row.cut_tokens > 0 for row in inputs),
        )
        return cls(tuple(row.spec(group) for row in inputs), usage, time.perf_counter() - began, make)

    @property
    def n(self) -> int:
        """Rows of a batch that it takes."""
        return len(self.items)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that run, control tokens included."""
        return self.usage.prompt_tokens

    def answer(self, results: Sequence[Any]) -> Mapping[str, Any]:
        """Fields of `Finished`."""
        return self.make(results)


def check_answer_size(size: int, way_out: str) -> None:
    """Refuse an answer that no result can hold, before any of it is computed.

    Args:
        size: the most bytes it may take.
        way_out: what to ask for less of.

    Raises:
        InvalidRequest: it is too large.
    """
    size += REST_BYTES
    if size > MAX_RESULT_BYTES:
        raise InvalidRequest(
            f"the answer may take {size} bytes, and a result holds {MAX_RESULT_BYTES}: {way_out}",
            bytes=size,
            limit=MAX_RESULT_BYTES,
        )
