"""Linear layers whose weights oneDNN has laid out for the processor beforehand.

Decoding on a CPU streams every weight from memory for a handful of rows. A plain `torch.nn.Linear` pays for
an unfit layout at each call; packed once, the same product takes about two thirds of the time at 8 rows, and
no longer at 512. The operators are private to torch (its compiler uses them), so they are tried before they
are trusted, and without them all stays as it was.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

log = logging.getLogger(__name__)

_PACKABLE = (torch.float32, torch.bfloat16)
_TYPICAL_ROWS = 16


class PackedLinear(nn.Module):
    """Takes the place of a `torch.nn.Linear`; holds its weight in packed form only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # No buffer: such a tensor cannot be copied, saved or moved as others are.
        pack = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001  there is no public one
        self.packed = pack(linear.weight.detach(), _TYPICAL_ROWS)
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        """Empty, for model code that asks the weight for its type or device."""

    @property
    def bytes(self) -> int:
        """Size of the packed weight."""
        return self.in_features * self.out_features * self.weight.element_size()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
        product: torch.Tensor = multiply(x, self.packed, self.bias, "none", [], "")
        return product


def pack_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """Pack every linear layer of a model on a CPU; does nothing where that does not work.

    Returns:
        How many layers were packed.
    """
    if dtype not in _PACKABLE or not works(dtype):
        return 0
    plain = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in plain:
        setattr(parent, name, PackedLinear(child))
    return len(plain)


def packed_bytes(model: nn.Module) -> int:
    """Size of all packed weights of a model."""
    return sum(module.bytes for module in model.modules() if isinstance(module, PackedLinear))


def works(dtype: torch.dtype) -> bool:
    """Whether this torch, on this processor, gives the right product from packed weights."""
    try:
        plain = nn.Linear(48, 32, dtype=dtype)
        x = torch.linspace(-1, 1, 3 * 5 * 48).to(dtype).view(3, 5, 48)
        with torch.inference_mode():
            ours, theirs = PackedLinear(plain)(x), plain(x)
        return bool(torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=0.02))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        log.info("linear layers stay unpacked: %s", str(error).split("\n", 1)[0])
        return False
