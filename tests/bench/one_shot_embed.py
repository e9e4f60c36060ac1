"""The part of `one_shot.py` about texts: vectors of a small real encoder, in every way to have them."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import peers
from one_shot_corpus import Corpus
from one_shot_side import Result, Setup
from one_shot_sides import Plain
from side_process import SideProcess
from side_ratio import Kind, Rates
from streamfleet_worker.engine import devices, minilm

HERE = Path(__file__).parent
LIMIT_S = 600.0
ALONE_SHARE = 4
"""Rounds that `alone` takes for as many texts as others have in one."""


SIDES = {
    "alone": Kind("one by one", "one_shot_sides.py"),
    "naive": Kind("batches as they arrive", "one_shot_sides.py", 1.5),
    "sentence": Kind("sentence-transformers", "sentence_side.py", 1.0),
    "ours": Kind("ours", "one_shot_sides.py"),
    "exact": Kind("ours, exact", "one_shot_sides.py", ours_first=False),
    "fleet": Kind("ours, through Redis", "one_shot_fleet_side.py", 0.95, ours_first=False),
    "fleet-whole": Kind("the same, one request", "one_shot_fleet_side.py", 0.95, ours_first=False),
}

Rounds = dict[str, list[Result]]


def command(name: str, setup: Path) -> list[str]:
    """How a side is started."""
    script = str(HERE / SIDES[name].script)
    if name == "sentence":
        return [str(peers.sentence_transformers().python), script, str(setup)]
    return [sys.executable, script, name, str(setup)]


def prepare(options: argparse.Namespace, folder: Path) -> tuple[Setup, Corpus]:
    """What the sides are given; the right vectors are those of each text by itself in float32."""
    devices.set_threads(options.threads)
    model = minilm.folder(print)
    reference = Plain(str(model), "float32", 1)
    corpus = Corpus(reference.tokenizer, options.rounds, options.texts)
    references = folder / "references"
    vectors = reference.embed(list(chain.from_iterable(corpus.rounds)))
    references.write_bytes(array("f", chain.from_iterable(vectors)).tobytes())
    setup = Setup(
        model=minilm.ALIAS,
        folder=str(model),
        precision=options.precision,
        threads=options.threads,
        batch=options.batch,
        rounds=corpus.rounds,
        warm_up=corpus.warm_up,
        references=str(references),
    )
    return setup, corpus


def measure(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of all sides, in turn."""
    if "sentence" in names:
        peers.sentence_transformers().prepare()
    rounds: Rounds = {name: [] for name in names}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        setup, corpus = prepare(options, folder)
        setup.write(folder / "setup.json")
        sides = {}
        for name in names:
            sides[name] = SideProcess(name, command(name, folder / "setup.json"), LIMIT_S)
            stack.callback(sides[name].stop)
            sides[name].wait_ready()
        for round_ in range(options.rounds):
            for name, side in sides.items():
                result = Result(**side.ask([round_, ALONE_SHARE if name == "alone" else 1]))
                rounds[name].append(result)
                rate = result.texts / result.seconds
                print(f"round {round_ + 1}: {name} {rate:.1f} texts/s", file=sys.stderr, flush=True)
    return {"corpus": str(corpus), "sides": {name: summary(name, rounds) for name in names}}


def rates(results: Sequence[Result]) -> list[Rates]:
    """Texts of each round."""
    return [Rates.of(result.texts, result.seconds, result.cpu_seconds) for result in results]


def summary(name: str, rounds: Rounds) -> dict[str, Any]:
    """The figures of one side."""
    results = rounds[name]
    return {
        "texts_per_s": statistics.median(rate.wall for rate in rates(results)),
        "texts_per_cpu_s": statistics.median(rate.cpu for rate in rates(results)),
        "cpu_s": {
            part: statistics.median(r.cpu_seconds[part] for r in results) for part in results[0].cpu_seconds
        },
        "least_cosine": min(r.least_cosine for r in results),
        "goal": SIDES[name].goal,
        "ratio": {} if name == "ours" else SIDES[name].ratios(rates(rounds.get("ours", [])), rates(results)),
    }


HEAD = (
    f"{'':22} {'texts':>7} {'texts':>7} {'least':>7}  {'ours by it, or it by ours':^25}\n"
    f"{'':22} {'/s':>7} {'/CPU-s':>7} {'cosine':>7} {'wall':>6} {'CPU':>6} {'wall, range':>11} {'goal':>6}"
)


def line(name: str, figures: dict[str, Any]) -> str:
    """A row of the table, at most 80 columns."""
    kind = SIDES[name]
    ratio = figures["ratio"]
    by_wall = f"{ratio['wall']['median']:.2f}" if ratio else ""
    by_cpu = f"{ratio['cpu']['median']:.2f}" if ratio else ""
    spread = f"{ratio['wall']['least']:.2f}-{ratio['wall']['most']:.2f}" if ratio else ""
    return (
        f"{kind.title:22} {figures['texts_per_s']:7.1f} {figures['texts_per_cpu_s']:7.1f}"
        f" {figures['least_cosine']:7.5f} {by_wall:>6} {by_cpu:>6} {spread:>11} {kind.goal_words:>6}"
    )


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    """The table."""
    print(
        f"MiniLM {options.precision}: {options.texts} {found['corpus']},\n"
        f"batch {options.batch}, {options.threads} thread(s), medians of {options.rounds} round(s)\n{HEAD}"
    )
    for name, figures in found["sides"].items():
        print(line(name, figures))
    for name, figures in found["sides"].items():
        if len(figures["cpu_s"]) > 1:
            parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in figures["cpu_s"].items())
            print(f"{SIDES[name].title}: CPU seconds: {parts}")
