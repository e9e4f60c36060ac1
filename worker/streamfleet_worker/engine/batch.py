"""What one forward pass computes: one ragged row of tokens, and which of them belong together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from streamfleet_worker.engine.kv_cache import Arena, Slot


class Group:
    """The decoding rows of one arena: one token each, neighbours in the pass from `first` on.

    Args:
        arena: where their keys and values are.
        first: place of the first one's token in the pass.
        positions: where each one's token stands in its sequence.
        written: rows that their new keys and values go to; the first ones of the arena if None.
        read: rows that they look at, if those are not simply its first ones.
    """

    def __init__(
        self,
        arena: Arena,
        first: int,
        positions: torch.Tensor,
        written: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
    ) -> None:
        self.arena = arena
        self.first = first
        self.count = positions.shape[0]
        self.positions = positions
        self.rows = read
        heads, width = arena.shape.heads, arena.width
        row = torch.arange(self.count, device=positions.device) if written is None else written
        head = torch.arange(heads, device=positions.device)
        self.places = ((row[:, None] * heads + head) * width + positions[:, None]).flatten()
        """Where their new keys and values go, in the flat view of the arena: `[count x kv_heads]`."""
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def mask(self, window: int | None, queries: int) -> torch.Tensor:
        """Additive, `[count x kv_heads, queries, width]`: a row sees its tokens, the last `window` ones."""
        found = self._masks.get((window, queries))
        if found is None:
            heads, width = self.arena.shape.heads, self.arena.width
            places = torch.arange(width, device=self.positions.device)
            hidden = places > self.positions[:, None]
            if window is not None:
                hidden |= places <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self.arena.keys.dtype, device=hidden.device)
            mask.masked_fill_(hidden, float("-inf"))
            found = mask[:, None, None].expand(-1, heads, queries, -1).reshape(-1, queries, width)
            self._masks[window, queries] = found
        return found


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of one prompt: tokens `[start, end)` of it, neighbours in the pass from `first` on."""

    slot: Slot
    first: int
    start: int
    end: int


@dataclass(slots=True)
class Batch:
    """One pass. The lists are parallel, one item for each token."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    masks: dict[tuple[int, int, int, int | None], torch.Tensor] = field(default_factory=dict)
    """Made once, used in every layer."""

    def decode(
        self, arena: Arena, token_ids: list[int], positions: list[int], rows: list[int] | None = None
    ) -> None:
        """Add a token for each of some rows of an arena; the first ones if `rows` is None."""
        device = arena.keys.device
        chosen = None if rows is None else torch.tensor(rows, device=device)
        places = torch.tensor(positions, device=device)
        self.groups.append(Group(arena, len(self.token_ids), places, chosen, chosen))
        self.token_ids += token_ids
        self.positions += positions

    def prefill(self, slot: Slot, start: int, token_ids: list[int]) -> None:
        """Add the next tokens of a prompt, `start` of which are in the cache."""
        end = start + len(token_ids)
        self.segments.append(Segment(slot, len(self.token_ids), start, end))
        self.token_ids += token_ids
        self.positions += range(start, end)
