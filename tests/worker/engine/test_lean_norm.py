"""Norms are replaced where nothing changes, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from streamfleet_worker.engine.lean_norm import LeanNorm, lean_norms


class Twice(LlamaRMSNorm):
    """A norm of a model of its own, which only bears the name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = super().forward(x) * 2
        return doubled


class TwiceRMSNorm(Twice):
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 576, 100])
def test_the_bits_stay_the_same(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    norm = LlamaRMSNorm(size).to(dtype).requires_grad_(False)
    norm.weight.normal_()
    model = nn.Sequential(norm, nn.Linear(size, 3))
    expected = {rows: norm(x) for rows, x in inputs(size, dtype).items()}
    assert lean_norms(model, dtype) == 1
    assert isinstance(model[0], LeanNorm)
    for rows, x in inputs(size, dtype).items():
        assert torch.equal(model[0](x), expected[rows])


def inputs(size: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {rows: torch.randn(1, rows, size, generator=generator).to(dtype) for rows in (1, 2, 16, 57)}


def test_what_norms_otherwise_is_left_alone() -> None:
    model = nn.ModuleList([TwiceRMSNorm(64), Gemma2RMSNorm(64), nn.LayerNorm(64)])
    for module in model:
        module.requires_grad_(False)
    before = [type(module) for module in model]
    assert lean_norms(model, torch.float32) == 0
    assert [type(module) for module in model] == before
