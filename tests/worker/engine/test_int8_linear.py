"""Layers of eight bits: close to plain ones, alike in any company, and refused where they do not pay."""

from typing import Any

import pytest
import torch
from torch import nn

from streamfleet_common.errors import Unsupported
from streamfleet_worker.engine import int8_linear, models
from streamfleet_worker.engine.encoder_model import load_encoder
from streamfleet_worker.engine.int8_linear import Int8Linear, require_int8
from streamfleet_worker.engine.packed_linear import PackedLinear, SharedLinear
from tiny_encoder import tiny_encoder
from tiny_model import tiny_model


def _has_int8() -> bool:
    try:
        require_int8(torch.device("cpu"))
    except Unsupported:
        return False
    return True


needs_int8 = pytest.mark.skipif(not _has_int8(), reason="this torch or processor has no fast int8")


def by_hand(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The same arithmetic in float64: whole numbers, one scale for each row and each output."""
    weight, x = linear.weight.double(), x.double()
    outputs, rows = weight.abs().amax(1) / 127, x.abs().amax(-1, keepdim=True) / 126
    product = (x / rows).round() @ (weight / outputs[:, None]).round().T
    bias: torch.Tensor | None = linear.bias
    return product * rows * outputs + (0 if bias is None else bias.double())


@needs_int8
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_the_product_is_that_of_whole_numbers(bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(96, 64, bias=bias)
    # The rows are of very unlike sizes.
    x = torch.randn(3, 17, 96) * torch.logspace(-3, 3, 17)[:, None]
    ours = Int8Linear(linear)(x)
    assert ours.shape == (3, 17, 64)
    torch.testing.assert_close(ours.double(), by_hand(linear, x), rtol=1e-4, atol=1e-4)
    half = Int8Linear(linear.bfloat16())(x.bfloat16())
    far = (half.double() - by_hand(linear, x.bfloat16())).norm(dim=-1) / ours.double().norm(dim=-1)
    assert far.max() < 0.02


@needs_int8
@torch.inference_mode()
def test_the_largest_value_does_not_wrap_around() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        linear = nn.Linear(64, 64, bias=False, dtype=dtype)
        linear.weight.copy_(torch.eye(64))
        x = torch.linspace(0.001, 300, 4096).view(-1, 1).expand(-1, 64).to(dtype)
        torch.testing.assert_close(Int8Linear(linear)(x), x, rtol=0.02, atol=0)
        torch.testing.assert_close(Int8Linear(linear)(-x), -x, rtol=0.02, atol=0)


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_zeros_stay_zeros_and_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 64, dtype=dtype)
    x[1, 5], x[2, 5], x[3, 5] = torch.nan, torch.inf, -torch.inf
    y = Int8Linear(nn.Linear(64, 64, bias=False, dtype=dtype))(x)
    assert (y[0] == 0).all()
    assert not y[1:].isfinite().any()


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_row_gets_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = Int8Linear(nn.Linear(384, 192, dtype=dtype))
    x = torch.randn(300, 384).to(dtype)
    together = layer(x)
    for count in (1, 2, 3, 7, 64, 299):
        assert torch.equal(layer(x[:count]), together[:count])


@needs_int8
@torch.inference_mode()
def test_an_encoder_in_int8() -> None:
    loaded = load_encoder(str(tiny_encoder("classifier")), "cpu", "int8")
    assert (loaded.precision, loaded.dtype) == ("int8", torch.bfloat16)
    modules: list[Any] = list(loaded.model.modules())
    # Of each layer: queries, keys and values as one; their output; up and down. And the pooler, not the head.
    assert sum(isinstance(module, Int8Linear) for module in modules) == 2 * 4 + 1
    assert sum(isinstance(module, SharedLinear) for module in modules) == 2 * 3
    assert isinstance(loaded.model.classifier, PackedLinear)
    plain = load_encoder(str(tiny_encoder("classifier")), "cpu", "bfloat16")
    assert loaded.weights_bytes < plain.weights_bytes
    ids = torch.arange(10, 30).view(1, -1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ours, theirs = (model.model(**batch).logits.float() for model in (loaded, plain))
    assert torch.cosine_similarity(ours, theirs).item() > 0.99
    assert not torch.equal(ours, theirs)


def test_decoders_and_gpus_have_none() -> None:
    with pytest.raises(Unsupported, match="for encoders") as refused:
        models.load(str(tiny_model()), "cpu", "int8")
    assert refused.value.feature == "int8"
    with pytest.raises(Unsupported, match="CPUs with VNNI"):
        require_int8(torch.device("cuda"))


def test_a_processor_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(Unsupported, match="CPUs with VNNI") as refused:
        load_encoder(str(tiny_encoder("bert")), "cpu", "int8")
    assert refused.value.feature == "int8"


def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)

    def missing(linear: nn.Linear) -> Int8Linear:
        raise AttributeError("no qlinear_prepack")

    monkeypatch.setattr(int8_linear, "Int8Linear", missing)
    with pytest.raises(Unsupported, match="has no int8: no qlinear_prepack"):
        require_int8(torch.device("cpu"))
    monkeypatch.setattr(int8_linear, "Int8Linear", lambda linear: lambda x: linear(x) + 1)
    with pytest.raises(Unsupported, match="wrong int8 products"):
        require_int8(torch.device("cpu"))
