"""What is found out about exactness at the start, and for whom it is promised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine_driver import Driver
from streamfleet_worker.engine.exactness import Exactness
from streamfleet_worker.engine.models import LoadedModel

Make = Callable[..., Driver]
Load = Callable[..., LoadedModel]


def find(loaded: LoadedModel, drive: Make) -> Exactness:
    engine: Any = drive(loaded, max_seq_len=256).engine
    found = Exactness.find(loaded, engine._runner, engine._cache)
    assert engine._runner.granule == found.granule
    assert not any(arena.slots for arena in engine._cache.arenas)
    return found


class Whimsical(nn.Linear):
    """Computes a few of its rows otherwise when there are just so many, as some kernels do.

    The difference is one in the last place of one number in thousands.
    """

    odd: tuple[int, ...] = (1, 2, 3)

    @classmethod
    def of(cls, linear: nn.Linear, odd: tuple[int, ...]) -> Whimsical:
        made = cls(linear.in_features, linear.out_features, bias=False)
        made.weight, made.odd = linear.weight, odd
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if x.shape[-2] in self.odd:
            rare = (y * 4096).long() % 1009 == 0
            y = torch.where(rare, y.nextafter(y + 1), y)
        return y


@pytest.mark.parametrize(
    ("odd", "granule"), [((1,), 2), ((1, 2, 3), 4), ((6,), 4), ((7, 12), 8), ((24,), 16)]
)
def test_passes_are_padded_to_where_rows_are_computed_alike(
    odd: tuple[int, ...], granule: int, llama: LoadedModel, drive: Make
) -> None:
    model = copy.deepcopy(llama.model)
    model.model.layers[1].mlp.down_proj = Whimsical.of(model.model.layers[1].mlp.down_proj, odd)
    found = find(replace(llama, model=model), drive)
    # The machine's own kernels may ask for more.
    assert found.granule % granule == 0
    assert found.name


def test_nothing_is_promised_when_a_row_depends_on_its_company(llama: LoadedModel, drive: Make) -> None:
    model = copy.deepcopy(llama.model)
    model.model.layers[1].register_forward_hook(lambda _m, _i, output: output + 1e-4 * output.shape[1])
    assert find(replace(llama, model=model), drive) == Exactness(1, "")


def test_nothing_is_promised_of_experts(load: Load, drive: Make) -> None:
    # Each computes as many rows as happen to choose it.
    assert find(load("mixtral"), drive) == Exactness(1, "")


def test_nothing_is_promised_of_several_threads(
    llama: LoadedModel, drive: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They part activations within vectors: a few numbers round otherwise, at places that rows move.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert find(llama, drive) == Exactness(1, "")


def test_a_name_is_shared_by_workers_that_compute_alike_and_by_no_others(
    llama: LoadedModel, load: Load, drive: Make
) -> None:
    name = find(llama, drive).name
    assert name.startswith("cpu-float32-1t-")
    assert find(replace(llama, model=copy.deepcopy(llama.model)), drive).name == name
    others = [
        find(replace(llama, revision="another"), drive).name,
        find(load("llama", pack=True), drive).name,
        find(load("llama", "bfloat16", pack=True), drive).name,
    ]
    assert len({name, *others}) == 1 + len([other for other in others if other])


def test_an_engine_tells_it_once_it_is_warm(llama: LoadedModel, drive: Make) -> None:
    engine: Any = drive(llama, max_seq_len=256).engine
    assert engine.info.exact == ""
    engine.warm_up()
    assert engine.info.exact.startswith("cpu-float32-1t-")


def test_an_engine_that_need_not_be_exact_promises_nothing_and_pads_nothing(
    llama: LoadedModel, drive: Make
) -> None:
    engine: Any = drive(llama, max_seq_len=256, exact=False).engine
    engine.warm_up()
    assert engine.info.exact == ""
    assert engine._runner.granule == 1
