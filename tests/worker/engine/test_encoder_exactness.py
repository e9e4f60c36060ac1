"""What is found out about the exactness of encoders, and for whom it is promised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from encoder_driver import encoder
from streamfleet_worker.engine.encoder_exactness import EncoderExactness
from streamfleet_worker.engine.encoder_model import EncoderModel
from streamfleet_worker.engine.encoder_runner import EncoderRunner
from tiny_encoder import MAX_POSITIONS


@cache
def found(kind: str, precision: str) -> EncoderExactness:
    return find(encoder(kind, precision))


def find(loaded: EncoderModel) -> EncoderExactness:
    runner = EncoderRunner(loaded)
    exactness = EncoderExactness.find(loaded, runner, max_batch_size=32, max_seq_len=MAX_POSITIONS)
    assert runner.granule == exactness.granule
    return exactness


def changed(change: Callable[[Any], None]) -> EncoderModel:
    """A classifier, with something changed in its model."""
    loaded = encoder("classifier", pack=False)  # packed weights cannot be copied
    model = copy.deepcopy(loaded.model)
    change(model)
    return replace(loaded, model=model)


class Whimsical(nn.Module):
    """A head that computes its rows otherwise when there are just so many, as some kernels do."""

    def __init__(self, linear: nn.Linear, odd: tuple[int, ...]) -> None:
        super().__init__()
        self._linear, self._odd = linear, odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._linear(x)
        return y.nextafter(y + 1) if len(x) in self._odd else y


@pytest.mark.parametrize(("odd", "granule"), [((1,), 2), ((1, 2, 3, 5), 4), ((8,), 16)])
def test_batches_are_filled_up_to_where_rows_are_computed_alike(odd: tuple[int, ...], granule: int) -> None:
    def change(model: Any) -> None:
        model.classifier = Whimsical(model.classifier, odd)

    exactness = find(changed(change))
    # The machine's own kernels may ask for more.
    assert exactness.granule % granule == 0
    assert exactness.name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "classifier", "reranker", "llama"])
def test_encoders_are_exact_on_a_cpu_with_one_thread(kind: str, precision: str) -> None:
    assert found(kind, precision).name.startswith(f"cpu-{precision}-1t-")


def test_nothing_is_promised_when_a_row_depends_on_its_company() -> None:
    def change(model: Any) -> None:
        model.bert.encoder.layer[1].register_forward_hook(
            lambda _module, _args, output: output + 1e-4 * output.shape[0]
        )

    assert find(changed(change)) == EncoderExactness(1, "")


def test_nothing_is_promised_when_full_rows_go_another_way() -> None:
    """A batch without a masked token may be computed otherwise than one with."""

    def change(model: Any) -> None:
        model.register_forward_pre_hook(whole, with_kwargs=True)

    def whole(module: Any, args: Any, inputs: Any) -> None:
        module.classifier.bias = nn.Parameter(
            torch.full((3,), 0.01 * float(inputs["attention_mask"].all())), requires_grad=False
        )

    assert find(changed(change)) == EncoderExactness(1, "")


def test_nothing_is_promised_of_several_threads_or_of_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = encoder("classifier")
    away = replace(loaded, device=torch.device("meta"))
    assert EncoderExactness.find(
        away, EncoderRunner(loaded), max_batch_size=8, max_seq_len=32
    ) == EncoderExactness(1, "")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert find(loaded) == EncoderExactness(1, "")


def test_each_model_and_precision_has_a_class_of_its_own() -> None:
    names = {
        found(kind, precision).name
        for kind in ("classifier", "reranker")
        for precision in ("float32", "bfloat16")
    }
    assert len(names) == 4
    assert find(encoder("classifier")).name in names
