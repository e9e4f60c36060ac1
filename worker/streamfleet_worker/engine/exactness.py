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
from collections.abc import Iterator, Sequence
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
    from streamfleet_worker.engine.encoder_model import EncoderModel
    from streamfleet_worker.engine.kv_cache import KVCache, Slot
    from streamfleet_worker.engine.model_runner import ModelRunner
    from streamfleet_worker.engine.models import LoadedModel

log = logging.getLogger(__name__)

METHOD = 2
"""To be counted up whenever a change of ours may change a request's bits."""

GRANULES = (1, 2, 4, 8, 16)
_ROWS = (*range(1, 18), 20, 24, 31, 32, 33, 40, 48, 57, 64, 80, 96, 100, 128, 160)
_NUMBERS = 1 << 15
"""So many are compared for each number of rows: rounding to bfloat16 hides most differences."""
_PROMPTS = (20, 75)
_COMPANY = (1, 2, 4, 7)
_NEXT = (2, 3, 5, 7)
"""The tokens after the prompts."""


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
            odd = odd_rows(loaded, _ROWS)
            for granule in () if is_hopeless(loaded) else GRANULES:
                if any(rows % granule == 0 for rows in odd):
                    continue
                runner.granule = granule
                if _holds(runner, cache, loaded.vocab_size):
                    name = worker_class(loaded, granule)
                    log.info("answers are exact among workers of class %s", name)
                    return cls(granule, name)
        runner.granule = 1
        log.warning(
            "answers are not exact: on %s in %s a row's numbers depend on its company",
            loaded.device_name,
            loaded.precision,
        )
        return cls(1, "")


def is_hopeless(loaded: LoadedModel | EncoderModel) -> bool:
    """Whether bits depend on the company, in places so few that trying would miss them.

    Several threads each take a part of an activation. Where a part ends within a vector, its last numbers
    are computed one by one and may round otherwise, and where that is moves with the number of rows.
    """
    splits = loaded.device.type == "cpu" and torch.get_num_threads() > 1
    return splits or _has_experts(loaded.model)


def _has_experts(model: nn.Module) -> bool:
    """Whether it is a mixture of experts: each computes as many rows as happen to choose it, never padded."""
    names = (f"{name} {type(module).__name__}".lower() for name, module in model.named_modules())
    return any("expert" in name or "moe" in name for name in names)


def odd_rows(loaded: LoadedModel | EncoderModel, tried: Sequence[int]) -> set[int]:
    """Those of the numbers of rows that some linear layer computes otherwise than many."""
    odd: set[int] = set()
    for layer, inputs, outputs in _linears(loaded.model):
        generator = torch.Generator().manual_seed(inputs)
        count = max(*tried, _NUMBERS // outputs)
        x = torch.randn(count, inputs, generator=generator).to(loaded.dtype).to(loaded.device)
        whole = layer(x[None])[0]
        for rows in tried:
            pieces = min(count // rows, -(-_NUMBERS // (rows * outputs)))
            starts = range(0, pieces * rows, rows)
            if not all(torch.equal(layer(x[None, s : s + rows])[0], whole[s : s + rows]) for s in starts):
                odd.add(rows)
    return odd


def _linears(model: nn.Module) -> Iterator[tuple[Any, int, int]]:
    """One linear layer of each kind and size, with the sizes of its input and output."""
    seen: set[tuple[object, ...]] = set()
    for module in model.modules():
        match module:
            case nn.Linear() | PackedLinear():
                inputs, outputs = module.in_features, module.out_features
            case Conv1D():
                inputs, outputs = module.weight.shape
            case _:
                continue
        kind = (type(module), inputs, outputs, module.bias is None)
        if kind not in seen:
            seen.add(kind)
            yield module, inputs, outputs


def _holds(runner: ModelRunner, cache: KVCache, vocab_size: int) -> bool:
    """Whether prompts and the tokens after them give the same logits alone and in several companies."""
    longest = cache.arenas[-1].width - len(_NEXT)
    for length in _PROMPTS:
        prompt = [(11 * i + 5) % vocab_size for i in range(min(length, longest))]
        alone = _logits(runner, cache, prompt, 0, vocab_size)
        for company in _COMPANY:
            if not torch.equal(alone, _logits(runner, cache, prompt, company, vocab_size)):
                return False
    return True


def _logits(runner: ModelRunner, cache: KVCache, prompt: list[int], company: int, vocab: int) -> torch.Tensor:
    """Logits after the prompt, and after each of some more tokens; `[1 + len(_NEXT), vocab_size]`.

    In company the prompt is cut in two where a block ends, and others are before and behind it.
    """
    others = [[(7 * i + 3 * n + 1) % vocab for i in range(3 + 5 * n)] for n in range(company)]
    rows = [*others[: company // 2], prompt, *others[company // 2 :]]
    slots = [cache.take(len(row) + len(_NEXT)) for row in rows]
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
        found = [runner.logits(runner.run(batch), [place])]
        for slot in slots:
            cache.start_decoding(slot)
        found += [_decode(runner, cache, slots, rows, me=me, step=step) for step in range(len(_NEXT))]
        return torch.cat(found)
    finally:
        for slot in slots:
            cache.free(slot)


def _decode(
    runner: ModelRunner, cache: KVCache, slots: list[Slot], rows: list[list[int]], *, me: int, step: int
) -> torch.Tensor:
    batch = Batch()
    place = 0
    for arena in cache.arenas:
        mine = {slot.row: number for number, slot in enumerate(slots) if slot.arena is arena}
        order = [mine[row] for row in sorted(mine)]
        if me in order:
            place = len(batch.token_ids) + order.index(me)
        if order:
            positions = [len(rows[number]) + step for number in order]
            batch.decode(arena, [_NEXT[step]] * len(order), positions)
    hidden = runner.run(batch)
    places = [place, *(p for p in range(len(rows)) if p != place)]
    return runner.logits(hidden, places)[:1]


def worker_class(loaded: LoadedModel | EncoderModel, granule: int, *further: str) -> str:
    """The name of a class of workers: what all of them have in common, in a few words and a digest."""
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
        *further,
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
