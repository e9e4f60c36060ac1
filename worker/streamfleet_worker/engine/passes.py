"""Forward passes whose faults stay with those who cause them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamfleet_common.errors import GenerationFailed
from streamfleet_worker.engine.faults import is_out_of_memory, place_of

if TYPE_CHECKING:
    from streamfleet_worker.engine.forward import Forward, Outcome
    from streamfleet_worker.engine.model_runner import ModelRunner
    from streamfleet_worker.engine.scheduler import Chunk
    from streamfleet_worker.engine.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Passed:
    """A pass that went well."""

    chunks: list[Chunk]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence that failed alone."""

    sequence: Sequence
    error: Exception


class Passes:
    """Runs a step's pass; if it fails, its halves, until whoever is guilty is alone.

    Args:
        forward: runs a pass.
        runner: tells whether the model still works at all.
        make_room: gives memory back, called when it is exhausted.
    """

    def __init__(self, forward: Forward, runner: ModelRunner, make_room: Callable[[], None]) -> None:
        self._forward = forward
        self._runner = runner
        self._make_room = make_room

    def run(self, decodes: list[Sequence], chunks: list[Chunk]) -> Iterator[Passed | Failed]:
        """What comes of a step, part by part; each is to be dealt with before the next is asked for.

        Raises:
            GenerationFailed: the model fails on any input.
        """
        # A choice may have failed by now, and its siblings are gone with it.
        decodes = [sequence for sequence in decodes if sequence.slot is not None]
        chunks = [chunk for chunk in chunks if chunk.sequence.slot is not None]
        if not decodes and not chunks:
            return
        try:
            outcome = self._compute(decodes, chunks)
        except Exception as error:  # noqa: BLE001
            _let_go(error)
            yield from self._bisect(decodes, chunks, error)
        else:
            yield Passed(chunks, outcome)

    def _compute(self, decodes: list[Sequence], chunks: list[Chunk]) -> Outcome:
        try:
            return self._forward.run(decodes, chunks)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _let_go(error)
            self._make_room()
            if len(decodes) + len(chunks) > 1:
                raise
            return self._forward.run(decodes, chunks)

    def _bisect(
        self, decodes: list[Sequence], chunks: list[Chunk], error: Exception
    ) -> Iterator[Passed | Failed]:
        if len(decodes) + len(chunks) == 1:
            yield Failed(decodes[0] if decodes else chunks[0].sequence, error)
            try:
                self._runner.probe()
            except Exception as own:
                raise GenerationFailed(
                    f"the model fails on any input ({own}): the worker must start anew", retryable=True
                ) from own
            return
        where = place_of(error)
        log.warning("a pass of %d sequences failed, halving it: %s", len(decodes) + len(chunks), where)
        if decodes and chunks:
            parts = [(decodes, []), ([], chunks)]
        else:
            d, c = -(-len(decodes) // 2), -(-len(chunks) // 2)
            parts = [(decodes[:d], chunks[:c]), (decodes[d:], chunks[c:])]
        for part in parts:
            yield from self.run(*part)


def _let_go(error: BaseException) -> None:
    """Free what a failed pass computed: the error holds the frames of the pass, and they its tensors."""
    held: BaseException | None = error
    seen: set[int] = set()
    while held is not None and id(held) not in seen:
        seen.add(id(held))
        traceback.clear_frames(held.__traceback__)
        held = held.__cause__ or held.__context__
