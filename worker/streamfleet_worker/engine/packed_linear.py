"""Linear layers whose weights oneDNN has laid out for the processor beforehand.

Decoding on a CPU streams every weight from memory for a handful of rows. A plain `torch.nn.Linear` pays for
an unfit layout at each call; packed once, the same product takes about two thirds of the time at 8 rows, and
no longer at 512. The operators are private to torch (its compiler uses them), so they are tried before they
are trusted, and without them all stays as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

_PACKABLE = (torch.float32, torch.bfloat16)
_TYPICAL_ROWS = 16

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
)
"""Names of layers of one parent that read the same input, in most models of transformers. Should a model feed
them otherwise, each still gets its own product."""


class PackedLinear(nn.Module):
    """Takes the place of a `torch.nn.Linear`; holds its weight in packed form only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # No buffer: such a tensor cannot be copied, saved or moved as others are.
        pack = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001  there is no public one
        self.packed = pack(linear.weight.detach(), _TYPICAL_ROWS)
        # Looked up once: to choose among its overloads takes as long as a small product.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        """Empty, for model code that asks the weight for its type or device."""

    @property
    def bytes(self) -> int:
        """Size of the packed weight."""
        return self.in_features * self.out_features * self.weight.element_size()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product: torch.Tensor = self._multiply(x, self.packed, self.bias, "none", [], "")
        return product


class Shared:
    """One product for several layers that read the same input, as queries, keys and values do."""

    def __init__(self, linears: Sequence[nn.Linear], make: Callable[[nn.Linear], Any]) -> None:
        biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
        whole = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=False)
        whole.weight = nn.Parameter(
            torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False
        )
        present = [bias for bias in biases if bias is not None]
        if present:
            whole.bias = nn.Parameter(torch.cat(present), requires_grad=False)
        self.linear = make(whole)
        self._sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def output(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """What the layer at `place` gives for `x`; computed for all of them when the first one asks."""
        if self._input is not x or self._outputs[place] is None:
            self._input = x
            self._outputs = list(self.linear(x).split_with_sizes(self._sizes, -1))
        output, self._outputs[place] = self._outputs[place], None
        if not any(part is not None for part in self._outputs):
            self._input = None
        return output  # type: ignore[return-value]  # it was made just now, or was there


class SharedLinear(nn.Module):
    """Takes the place of one of the layers of a `Shared`; the first of them holds its weight."""

    def __init__(self, shared: Shared, place: int) -> None:
        super().__init__()
        self._shared = shared
        self._place = place
        if place == 0:
            self.packed = shared.linear
        self.weight = shared.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return self._shared.output(self._place, x)


def pack_linears(
    model: nn.Module, dtype: torch.dtype, make: Callable[[nn.Linear], nn.Module] | None = None
) -> int:
    """Pack every linear layer of a model on a CPU; does nothing where that does not work.

    Layers that are known to read the same input become one product.

    Args:
        model: on a CPU.
        dtype: of its weights.
        make: makes what takes a layer's place; a `PackedLinear` unless told otherwise.

    Returns:
        How many layers were packed.
    """
    if dtype not in _PACKABLE or not works(dtype):
        return 0
    make = make or PackedLinear
    packed = 0
    for parent in list(model.modules()):
        plain = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        packed += len(plain)
        for names in SIBLINGS:
            linears = [plain[name] for name in names if name in plain]
            if len(linears) == len(names) and len({linear.bias is None for linear in linears}) == 1:
                shared = Shared(linears, make)
                for place, name in enumerate(names):
                    setattr(parent, name, SharedLinear(shared, place))
                    del plain[name]
        for name, child in plain.items():
            setattr(parent, name, make(child))
    return packed


def packed_bytes(model: nn.Module) -> int:
    """Size of all packed weights of a model."""
    return sum(getattr(module, "bytes", 0) for module in model.modules())


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
