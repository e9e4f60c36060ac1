"""Decode passes that are recorded once and then replayed: a GPU is told of a step in one call.

A pass of a small model is hundreds of kernels, and launching them takes longer than running them. Recorded
passes have fixed shapes, so the rows of each arena are rounded up to a bucket; what is computed for nobody is
written to the arena's spare row. Everything that changes from step to step is in buffers that stay where they
are: token ids, positions, rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from streamfleet_worker.engine.batch import Batch, Group

if TYPE_CHECKING:
    from streamfleet_worker.engine.kv_cache import Arena

MAX_GRAPHS = 64
"""Recorded passes that are kept, those used last; each keeps memory for what it computes."""

Shape = tuple[tuple["Arena", int, int], ...]
"""Arenas, the versions of their memory, and rows."""

Compute = Callable[[torch.Tensor, torch.Tensor, Batch], torch.Tensor]
"""Token ids, positions and a batch to hidden states, `[tokens, hidden_size]`."""

Record = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""What makes a replay of a computation, and the tensor that holds its result after each replay."""


def record(compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Record a computation on the current GPU."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # libraries make their workspaces at the first calls, which cannot be recorded
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compute()
    return graph.replay, result


def bucket(rows: int, limit: int) -> int:
    """`rows` rounded up to 1, 2, 4 or a multiple of 8, but not beyond `limit`."""
    rounded = next((size for size in (1, 2, 4) if rows <= size), -(-rows // 8) * 8)
    return max(rows, min(rounded, limit))


@dataclass(slots=True)
class _Recorded:
    """One recorded pass and its buffers; the lists run over its tokens, the void ones too."""

    replay: Callable[[], None]
    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    hidden: torch.Tensor


class DecodeGraphs:
    """Recorded passes by the shape of their batch.

    Args:
        compute: runs the model's body.
        record: makes a replay; another one than the GPU's in tests.
    """

    def __init__(self, compute: Compute, record: Record = record) -> None:
        self._compute = compute
        self._record = record
        self._recorded: OrderedDict[Shape, _Recorded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Hidden states of a batch's tokens; None if it is none that can be recorded."""
        if batch.segments or any(group.rows is not None for group in batch.groups):
            return None
        arenas = [group.arena for group in batch.groups]
        counts = [bucket(group.count, group.arena.capacity) for group in batch.groups]
        shape = tuple((arena, arena.version, count) for arena, count in zip(arenas, counts, strict=True))
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        kept: list[int] = []
        for group, count in zip(batch.groups, counts, strict=True):
            mine, void = slice(group.first, group.first + group.count), count - group.count
            kept += range(len(rows), len(rows) + group.count)
            token_ids += [*batch.token_ids[mine], *[0] * void]
            positions += [*batch.positions[mine], *[0] * void]
            rows += [*range(group.count), *[group.arena.spare] * void]
        device = arenas[0].keys.device
        changing = torch.tensor([token_ids, positions, rows], pin_memory=device.type == "cuda")
        recorded = self._recorded.get(shape)
        if recorded is None:
            recorded = self._make(shape, changing.to(device))
        self._recorded.move_to_end(shape)
        for buffer, values in zip(
            (recorded.token_ids, recorded.positions, recorded.rows), changing, strict=True
        ):
            buffer.copy_(values, non_blocking=True)
        recorded.replay()
        if len(kept) == len(rows):
            return recorded.hidden
        return recorded.hidden[torch.tensor(kept, device=device)]

    def _make(self, shape: Shape, changing: torch.Tensor) -> _Recorded:
        self._forget()
        token_ids, positions, rows = changing.unbind()

        def compute() -> torch.Tensor:
            batch, first = Batch(), 0
            for arena, _, count in shape:
                mine = slice(first, first + count)
                batch.groups.append(Group(arena, first, positions[mine], rows[mine]))
                first += count
            return self._compute(token_ids, positions, batch)

        replay, hidden = self._record(compute)
        recorded = self._recorded[shape] = _Recorded(replay, token_ids, positions, rows, hidden)
        return recorded

    def _forget(self) -> None:
        """Drop what refers to memory that is gone, and what was not used for longest."""
        for shape in [s for s in self._recorded if any(arena.version != version for arena, version, _ in s)]:
            del self._recorded[shape]
        while len(self._recorded) >= MAX_GRAPHS:
            self._recorded.popitem(last=False)
