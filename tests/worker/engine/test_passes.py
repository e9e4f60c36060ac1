"""What a failed pass leaves behind."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamfleet_worker.engine.passes import Failed, Passes


class Greedy:
    """Passes that compute something and then find no memory for more."""

    def __init__(self, error: Exception, cause: Exception | None) -> None:
        self.error = error
        self.cause = cause
        self.computed: list[weakref.ref[torch.Tensor]] = []
        self.kept: list[int] = []
        """How much of earlier passes was still there when each began."""

    def run(self, decodes: list[Any], chunks: list[Any]) -> Any:
        self.kept.append(sum(tensor() is not None for tensor in self.computed))
        hidden = torch.zeros(len(decodes) + len(chunks))
        self.computed.append(weakref.ref(hidden))
        self._attend(hidden)

    def _attend(self, hidden: torch.Tensor) -> None:
        try:
            raise (self.cause or self.error).with_traceback(None)
        except Exception as error:
            if self.cause is None:
                raise
            raise self.error.with_traceback(None) from error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), None),
        (ValueError("a fault of its own"), None),
        (RuntimeError("out of memory"), ValueError("the first fault")),
    ],
)
def test_a_pass_that_failed_holds_no_memory_while_its_halves_run(
    error: Exception, cause: Exception | None
) -> None:
    forward: Any = Greedy(error, cause)
    runner: Any = SimpleNamespace(probe=lambda: None)
    sequences: list[Any] = [SimpleNamespace(slot=object()) for _ in range(4)]
    passes = Passes(forward, runner, lambda: None)
    parts = list(passes.run(sequences, []))
    assert [part.sequence for part in parts if isinstance(part, Failed)] == sequences
    assert len(forward.kept) >= 7
    assert not any(forward.kept)
