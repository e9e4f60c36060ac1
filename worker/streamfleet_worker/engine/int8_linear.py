"""Linear layers in whole numbers of eight bits, for encoders on a CPU.

A weight has one scale for each output, an input one for each row, found when it comes: a row's numbers so
depend on no other row, and since whole numbers add up exactly, its bits do not either. On processors with
VNNI the product takes half the time of bfloat16; finding the scales and applying them takes some of it back,
so it pays from about a hundred rows on (`docs/models.md` has the figures).

The operators are private to torch (its compiler uses them), so they are tried before they are trusted.
"""

from __future__ import annotations

import torch
from torch import nn

from streamfleet_common.errors import Unsupported
from streamfleet_worker.engine.packed_linear import PackedLinear

_FEW_OUTPUTS = 64
_LARGEST = 126.0
"""Not 127: the scale itself is rounded, in bfloat16 by up to 0.4 %."""
_ZERO = 128
"""Stands for zero in the inputs. They are unsigned, since for signed ones oneDNN has no fast product."""


class Int8Linear(nn.Module):
    """Takes the place of a `torch.nn.Linear`; what goes in and comes out has the type of its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias: torch.Tensor | None = linear.bias
        weight = linear.weight.detach().float()
        self._scales = weight.abs().amax(1).clamp_min(1e-12) / 127
        rounded = (weight / self._scales[:, None]).round().to(torch.int8)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        """Empty, for model code that asks the weight for its type or device."""

    @property
    def bytes(self) -> int:
        """Size of the weight and its scales."""
        return self.in_features * self.out_features + self._scales.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        rows = x.reshape(-1, self.in_features)
        largest = _largest(rows).clamp_min_(1e-6)
        # By way of signed numbers: torch converts to unsigned ones ten times as slowly.
        signed = torch.mul(rows, _LARGEST / largest).round_().to(torch.int8)
        y: torch.Tensor = self._multiply(
            signed.bitwise_xor_(-_ZERO).view(torch.uint8),
            1.0,
            _ZERO,
            self._packed,
            self._scales,
            self._zeros,
            None,
            1.0,
            0,
            x.dtype,
            "none",
            [],
            "",
        )
        scale = largest / _LARGEST
        y = y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)
        return y.view(*x.shape[:-1], self.out_features)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The largest size in each row, `[rows, 1]`."""
    if rows.dtype != torch.bfloat16:
        return rows.abs().amax(-1, keepdim=True)
    # Without signs, bits are in the order of the numbers, and torch compares them three times as fast.
    bits = rows.view(torch.int16).bitwise_and(0x7FFF)
    return bits.amax(-1, keepdim=True).view(torch.bfloat16)


def int8_or_packed(linear: nn.Linear) -> nn.Module:
    """What takes a layer's place: heads with a few outputs are as fast, and more exact, as they were."""
    return (Int8Linear if linear.out_features >= _FEW_OUTPUTS else PackedLinear)(linear)


def require_int8(device: torch.device) -> None:
    """Make sure that int8 is worth it and right on this machine.

    Raises:
        Unsupported: it is not a CPU with VNNI, or this torch has no such products.
    """
    if device.type != "cpu" or not torch.cpu._is_vnni_supported():  # noqa: SLF001  there is no public one
        raise Unsupported(
            "precision int8 is for CPUs with VNNI, where it was measured to pay: use bfloat16", feature="int8"
        )
    try:
        plain = nn.Linear(96, 80)
        x = torch.linspace(-1, 1, 7 * 96).view(7, 96)
        with torch.inference_mode():
            ours, theirs = Int8Linear(plain)(x), plain(x)
        is_right = torch.allclose(ours, theirs, rtol=0.05, atol=0.05)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        raise Unsupported(f"this torch ({torch.__version__}) has no int8: {error}", feature="int8") from error
    if not is_right:
        raise Unsupported(f"this torch ({torch.__version__}) gives wrong int8 products here", feature="int8")
