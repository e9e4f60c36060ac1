"""Whether a request gets the same bits alone and in any company, found out by trying.

A token's numbers depend on its own sequence only as long as every kernel computes a row alike, however many
rows it is given. Attention is made so (see `attention`); for the matrix products of the linear layers it
depends on the library's kernels and on the processor, which choose their way by the number of rows. So the
smallest multiple of rows at which they do is looked for, and passes are padded to it. A claim is made only
for the class of workers that it was tried on: processor, threads, arithmetic, libraries and model.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from streamfleet_worker.engine.batch import Batch
from streamfleet_worker.engine.packed_linear import PackedLinear

if TYPE_CHECKING:
    from streamfleet_worker.engine.kv_cache import KVCache, Slot
    from streamfleet_worker.engine.model_runner import ModelRunner
    from streamfleet_worker.engine.models import LoadedModel

log = logging.getLogger(__name__)

METHOD = 1
"""To be counted up whenever a change of ours may change a request's bits."""

GRANULES = (1, 2, 4, 8, 16)
_ROWS = (*range(1, 18), 20, 24, 31, 32, 33, 40, 48, 57, 64, 80, 96, 100, 128, 160)
_PROMPT = 75
_COMPANY = (1, 2, 4, 7)
_NEXT = 2
"""The token after the prompts."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was found."""

    granule: int
    """Passes are padded to a multiple of so many tokens."""
    name: str
    """The class of workers that give the same bits; "" if not even this one does."""

    @classmethod
    def find(cls, loaded: LoadedModel, runner: ModelRunner, cache: KVCache) -> Exactness:
        """Try the model's layers and then the whole; leaves the runner with the granule that was found.

        Nothing may be running.
        """
        with torch.inference_mode():
            odd = _odd_rows(loaded)
            for granule in GRANULES:
                if any(rows % granule == 0 for rows in odd):
                    continue
                runner.granule = granule
                if _holds(runner, cache, loaded.vocab_size):
                    name = _name(loaded, granule)
                    log.info("answers are exact among workers of class %s", name)
                    return cls(granule, name)
        runner.granule = 1
        log.warning(
            "answers are not exact: on %s in %s a row's numbers depend on its company",
            loaded.device_name,
            loaded.precision,
        )
        return cls(1, "")


def _odd_rows(loaded: LoadedModel) -> set[int]:
    """Numbers of rows that some linear layer computes otherwise than many."""
    odd: set[int] = set()
    for layer, inputs in _linears(loaded.model):
        generator = torch.Generator().manual_seed(inputs)
        x = torch.randn(max(_ROWS), inputs, generator=generator).to(loaded.dtype).to(loaded.device)
        whole = layer(x[None])[0]
        odd.update(rows for rows in _ROWS if not torch.equal(layer(x[None, :rows])[0], whole[:rows]))
    return odd


def _linears(model: nn.Module) -> Iterator[tuple[Any, int]]:
    """One linear layer of each kind and size, with the size of its input."""
    seen: set[tuple[object, ...]] = set()
    for module in model.modules():
        match module:
            case nn.Linear() | PackedLinear():
                size = (type(module), module.in_features, module.out_features, module.bias is None)
                inputs = module.in_features
            case Conv1D():
                size = (Conv1D, *module.weight.shape)
                inputs = module.weight.shape[0]
            case _:
                continue
        if size not in seen:
            seen.add(size)
            yield module, inputs


def _holds(runner: ModelRunner, cache: KVCache, vocab_size: int) -> bool:
    """Whether one prompt and the token after it give the same logits alone and in several companies."""
    length = min(_PROMPT, cache.arenas[-1].width - 1)
    prompt = [(11 * i + 5) % vocab_size for i in range(length)]
    alone = _logits(runner, cache, prompt, 0, vocab_size)
    return all(
        torch.equal(alone, _logits(runner, cache, prompt, company, vocab_size)) for company in _COMPANY
    )


def _logits(runner: ModelRunner, cache: KVCache, prompt: list[int], company: int, vocab: int) -> torch.Tensor:
    """Logits after the prompt, and after one more token; `[2, vocab_size]`.

    In company the prompt is cut in two where a block ends, and others are before and behind it.
    """
    others = [[(7 * i + 3 * n + 1) % vocab for i in range(3 + 5 * n)] for n in range(company)]
    rows = [*others[: company // 2], prompt, *others[company // 2 :]]
    slots = [cache.take(len(row) + 1) for row in rows]
    me = company // 2
    cut = 32 if company and len(prompt) > 32 else 0
    try:
        if cut:
            first = Batch()
            first.prefill(slots[me], 0, prompt[:cut])
            runner.run(first)
        batch = Batch()
        place = 0
        for number, (slot, row) in enumerate(zip(slots, rows, strict=True)):
            batch.prefill(slot, cut if number == me else 0, row[cut:] if number == me else row)
            if number == me:
                place = len(batch.token_ids) - 1
        after_prompt = runner.logits(runner.run(batch), [place])
        for slot in slots:
            cache.start_decoding(slot)
        after_token = _decode(runner, cache, slots, rows, me)
        return torch.cat([after_prompt, after_token])
    finally:
        for slot in slots:
            cache.free(slot)


def _decode(
    runner: ModelRunner, cache: KVCache, slots: list[Slot], rows: list[list[int]], me: int
) -> torch.Tensor:
    batch = Batch()
    place = 0
    for arena in cache.arenas:
        mine = {slot.row: number for number, slot in enumerate(slots) if slot.arena is arena}
        order = [mine[row] for row in sorted(mine)]
        if me in order:
            place = len(batch.token_ids) + order.index(me)
        if order:
            batch.decode(arena, [_NEXT] * len(order), [len(rows[number]) for number in order])
    hidden = runner.run(batch)
    places = [place, *(p for p in range(len(rows)) if p != place)]
    return runner.logits(hidden, places)[:1]


def _name(loaded: LoadedModel, granule: int) -> str:
    """The class of workers: what all of them have in common, in a few words and a digest."""
    threads = torch.get_num_threads()
    parts = [
        METHOD,
        granule,
        _processor(loaded.device),
        threads,
        loaded.precision,
        loaded.revision,
        torch.__version__,
        torch.__config__.show(),
        transformers.__version__,
        any(isinstance(module, PackedLinear) for module in loaded.model.modules()),
    ]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    return f"{loaded.device.type}-{loaded.precision}-{threads}t-{digest}"


def _processor(device: torch.device) -> str:
    """What decides which kernels a library chooses."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n", 1)[0].splitlines() if info.exists() else []
    told = ("model name", "cpu family", "model\t", "stepping", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(told))])
