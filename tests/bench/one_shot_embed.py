"""The part of `one_shot.py` about texts: vectors of a small real encoder, in every way to have them."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from array import array
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import peers
from one_shot_corpus import Corpus
from one_shot_side import Result, Setup
from one_shot_sides import Plain
from side_process import SideProcess
from streamfleet_worker.engine import devices, minilm

HERE = Path(__file__).parent
LIMIT_S = 600.0
ALONE_SHARE = 4
"""Rounds that `alone` takes for as many texts as others have in one."""


@dataclass(frozen=True)
class Kind:
    """One side: what it is called in the table, and how the ratio with ours is to be read."""

    title: str
    script: str
    goal: float | None = None
    ours_first: bool = True
    """The ratio is ours by it; else it by ours."""


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


def cpu(result: Result) -> float:
    """All processes of a side together."""
    return sum(result.cpu_seconds.values())


def summary(name: str, rounds: Rounds) -> dict[str, Any]:
    """The figures of one side."""
    results = rounds[name]
    return {
        "texts_per_s": statistics.median(r.texts / r.seconds for r in results),
        "texts_per_cpu_s": statistics.median(r.texts / cpu(r) for r in results),
        "cpu_s": {
            part: statistics.median(r.cpu_seconds[part] for r in results) for part in results[0].cpu_seconds
        },
        "least_cosine": min(r.least_cosine for r in results),
        "goal": SIDES[name].goal,
        "ratio": {
            kind: {"median": statistics.median(values), "least": min(values), "most": max(values)}
            for kind, values in ratios(name, rounds).items()
            if values and name != "ours"
        },
    }


def ratios(name: str, rounds: Rounds) -> dict[str, list[float]]:
    """By wall clock and by CPU time, of each round."""
    found: dict[str, list[float]] = {"wall": [], "cpu": []}
    for ours, it in zip(rounds.get("ours", []), rounds[name], strict=False):
        wall = (ours.texts / ours.seconds) / (it.texts / it.seconds)
        by_cpu = (ours.texts / cpu(ours)) / (it.texts / cpu(it))
        for kind, ratio in (("wall", wall), ("cpu", by_cpu)):
            found[kind].append(ratio if SIDES[name].ours_first else 1 / ratio)
    return found


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
    goal = f"≥ {kind.goal:g}" if kind.goal else ""
    return (
        f"{kind.title:22} {figures['texts_per_s']:7.1f} {figures['texts_per_cpu_s']:7.1f}"
        f" {figures['least_cosine']:7.5f} {by_wall:>6} {by_cpu:>6} {spread:>11} {goal:>6}"
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
