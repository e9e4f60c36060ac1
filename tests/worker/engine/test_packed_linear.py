"""Packed linear layers give what plain ones give, or are not used."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine_driver import Driver
from streamfleet_worker.engine import models, packed_linear
from streamfleet_worker.engine.models import LoadedModel
from streamfleet_worker.engine.packed_linear import PackedLinear, pack_linears
from tiny_model import tiny_model

needs_packing = pytest.mark.skipif(
    not packed_linear.works(torch.float32), reason="this torch or processor has no packed linear layers"
)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_the_plain_layer(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(96, 64, bias=bias, dtype=dtype)
    packed = PackedLinear(plain)
    for shape in [(1, 96), (8, 1, 96), (3, 17, 96)]:
        x = torch.randn(shape).to(dtype)
        with torch.inference_mode():
            torch.testing.assert_close(packed(x), plain(x), rtol=0.01, atol=0.01)
    x = torch.randn(5, 4, 96).to(dtype).transpose(0, 1)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x), rtol=0.01, atol=0.01)


@needs_packing
def test_a_packed_model_gives_the_same_tokens_and_says_how_big_it_is(
    llama: LoadedModel, drive: Callable[..., Driver]
) -> None:
    packed = models.load(str(tiny_model()), device="cpu")
    assert sum(isinstance(m, PackedLinear) for m in packed.model.modules()) == 2 * 7 + 1
    assert packed.weights_bytes == llama.weights_bytes
    answers = []
    for loaded in (llama, packed):
        driver = drive(loaded)
        driver.engine.warm_up()  # type: ignore[attr-defined]
        for number in range(12):
            driver.add(str(number), prompt_token_ids=[3 + number] * (1 + 7 * number), max_tokens=24)
        answers.append([heard.token_ids for heard in driver.run().values()])
    assert answers[0] == answers[1]


def test_without_the_operators_all_stays_as_it_was(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(linear: nn.Linear) -> PackedLinear:
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(packed_linear, "PackedLinear", broken)
    model = copy.deepcopy(llama.model)
    assert pack_linears(model, torch.float32) == 0
    assert type(model.lm_head) is nn.Linear
    assert pack_linears(model, torch.float16) == 0
