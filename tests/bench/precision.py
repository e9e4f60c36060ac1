"""What each precision costs and gives on a CPU: linear layers alone, and MiniLM as a whole.

    python tests/bench/precision.py

Beside ours stands torch's own dynamic quantization, which finds one scale for all rows of a batch. A time is
the least of several, of one thread, in processor time; the precisions take turns.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamfleet_worker.engine import devices
from streamfleet_worker.engine.encoder_model import EncoderModel, load_encoder
from streamfleet_worker.engine.int8_linear import Int8Linear
from streamfleet_worker.engine.packed_linear import PackedLinear

ENCODER = ((384, 1152), (384, 384), (384, 1536), (1536, 384))
"""Inputs and outputs of MiniLM's layers."""
DECODER = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
"""Of SmolLM2's, its head the last."""
PRECISIONS = ("float32", "bfloat16", "int8")
TEXTS = 64


def least_s(functions: Mapping[str, Callable[[], Any]], *, rounds: int) -> dict[str, float]:
    """Processor seconds of each, the least of so many rounds."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - begin)
    return best


def time_layer(inputs: int, outputs: int, rows: int, rounds: int) -> str:
    """A line of the table: microseconds of one layer, and the error of its int8."""
    plain = nn.Linear(inputs, outputs).requires_grad_(requires_grad=False)
    half = nn.Linear(inputs, outputs, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
    half.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it will be moved elsewhere
        quantize: Any = torch.ao.quantization.quantize_dynamic
        dynamic = quantize(nn.Sequential(plain), {nn.Linear})
    x = torch.randn(rows, inputs)
    short = x.to(torch.bfloat16)
    packed, packed_half, int8 = PackedLinear(plain), PackedLinear(half), Int8Linear(half)
    best = least_s(
        {
            "float32": lambda: packed(x),
            "bfloat16": lambda: packed_half(short),
            "int8": lambda: int8(short),
            "dynamic": lambda: dynamic(x),
        },
        rounds=rounds,
    )
    error = (int8(short).float() - plain(x)).norm() / plain(x).norm()
    times = " | ".join(f"{seconds * 1e6:,.0f}" for seconds in best.values())
    return f"| {inputs} → {outputs} | {rows} | {times} | {error:.1%} |"


def vectors(loaded: EncoderModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The texts' vectors, of length one."""
    mask = batch["attention_mask"].unsqueeze(-1)
    hidden = loaded.model(**batch).last_hidden_state.float()
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


def all_vectors(loaded: EncoderModel, made: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Those of each batch."""
    return [vectors(loaded, batch) for batch in made]


def batches(loaded: EncoderModel, texts: list[str], size: int) -> list[dict[str, torch.Tensor]]:
    """The texts by length, so many at a time."""
    rows = sorted((loaded.tokenizer.encode(text)[: loaded.max_positions] for text in texts), key=len)
    made = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        width = max(map(len, part))
        ids = torch.tensor([row + [loaded.pad_token_id] * (width - len(row)) for row in part])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in part])
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


def time_model(rounds: int) -> None:
    """Texts a second of MiniLM, and how near its vectors are to those of float32."""
    models = {precision: load_encoder("minilm", "cpu", precision, progress=print) for precision in PRECISIONS}
    first = models["float32"]
    lines = [
        line
        for file in sorted(Path("docs").glob("*.md"))
        for line in file.read_text().splitlines()
        if len(line) > 60
    ]
    texts = lines[:TEXTS]
    print(f"\n| {TEXTS} lines of our own pages | " + " | ".join(PRECISIONS) + " | int8 / bfloat16 |")
    for size in (1, 4, 8, 16, 32):
        best = least_s(
            {
                precision: partial(all_vectors, loaded, batches(first, texts, size))
                for precision, loaded in models.items()
            },
            rounds=rounds,
        )
        rates = " | ".join(f"{TEXTS / seconds:.0f}" for seconds in best.values())
        print(f"| texts/s in batches of {size} | {rates} | {best['bfloat16'] / best['int8']:.2f} |")
    whole = batches(first, lines, 16)
    for precision, loaded in models.items():
        near = torch.cat([(vectors(loaded, b) * vectors(first, b)).sum(1) for b in whole])
        megabytes = loaded.weights_bytes / 1e6
        print(f"{precision}: cosine to float32 of {len(lines)} texts: ", end="")
        print(f"least {near.min():.4f}, mean {near.mean():.4f}; weights {megabytes:.0f} MB")


@torch.inference_mode()
def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    devices.set_threads(1)
    torch.manual_seed(0)
    print(devices.describe(torch.device("cpu")), "torch", torch.__version__)
    print("| layer | rows | float32, µs | bfloat16 | int8 | torch's dynamic int8 | error of int8 |")
    for shapes, rows in ((ENCODER, (256, 2048)), (DECODER, (16,))):
        for inputs, outputs in shapes:
            for count in rows:
                print(time_layer(inputs, outputs, count, options.rounds), flush=True)
    time_model(options.rounds)


if __name__ == "__main__":
    main()
