"""Packed linear layers give what plain ones give, or are not used."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine_driver import Driver
from streamfleet_worker.engine import models, packed_linear
from streamfleet_worker.engine.models import LoadedModel
from streamfleet_worker.engine.packed_linear import PackedLinear, SharedLinear, pack_linears
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


class Siblings(nn.Module):
    """Layers by the names that attention gives them."""

    def __init__(self, *, biases: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 48, bias=biases[0])
        self.k_proj = nn.Linear(32, 16, bias=biases[1])
        self.v_proj = nn.Linear(32, 16, bias=biases[2])
        self.o_proj = nn.Linear(48, 32)


@needs_packing
@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (True, False, True)])
@torch.inference_mode()
def test_layers_that_share_a_product_give_what_each_gave(biases: tuple[bool, bool, bool]) -> None:
    torch.manual_seed(1)
    plain = Siblings(biases=biases)
    packed = copy.deepcopy(plain)
    assert pack_linears(packed, torch.float32) == 4
    shared = sum(isinstance(module, SharedLinear) for module in packed.children())
    assert shared == (3 if len(set(biases)) == 1 else 0)
    one, other = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    # In any order, for the same input and for several, again and again, some left out.
    for names in ("qkv", "vkq", "kk", "q", "v", "qvk"):
        for x in (one, other, one):
            for name in names:
                ours, theirs = getattr(packed, f"{name}_proj")(x), getattr(plain, f"{name}_proj")(x)
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, x in zip("qkvqkv", (one, other, one, other, one, other), strict=True):
        ours, theirs = getattr(packed, f"{name}_proj")(x), getattr(plain, f"{name}_proj")(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_packing
def test_a_packed_model_gives_the_same_tokens_and_says_how_big_it_is(
    llama: LoadedModel, drive: Callable[..., Driver]
) -> None:
    packed = models.load(str(tiny_model()), device="cpu")
    # Of each layer: queries, keys and values; their output; gate and up; down. And the head.
    assert sum(isinstance(m, PackedLinear) for m in packed.model.modules()) == 2 * 4 + 1
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
