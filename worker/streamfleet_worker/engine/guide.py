"""The form that a guided answer must have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Matcher(Protocol):
    """How far one answer has come in its form; belongs to one row and one thread."""

    def fill(self, bitmask: torch.Tensor) -> None:
        """Set the bits of the tokens that may come next: int32 `[ceil(vocab_size / 32)]`, low bits first."""

    def accept(self, token_id: int) -> None:
        """Go on by a token that the mask allowed; an end token may come where the form is complete."""


class Guide(Protocol):
    """A compiled form; may be shared by rows and threads."""

    def matcher(self) -> Matcher:
        """A matcher at the start of the answer."""
