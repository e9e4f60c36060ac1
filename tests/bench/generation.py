"""Tokens per second of one model on one machine: ours, and every other way to have the same answers.

    python tests/bench/generation.py [--rounds 4] [--json]
    python tests/bench/generation.py --only ours static --requests 16
    python tests/bench/generation.py --check
    python tests/bench/generation.py --only ours fleet --records runs && streamfleet report runs/*.jsonl

Each side (see `generation_sides.py`, `vllm_side.py`, `fleet_side.py`) is a process of its own. They take
turns, round by round, while the others idle: what else the machine does meets all of them alike. The ratio
counts, not the absolute figures, since machines differ and are shared; that by CPU time is the steadier one.
For `exact` and `fleet` it is theirs by that of `ours`, for all others that of `ours` by theirs. The first run
installs vLLM in an environment of its own, about 3 GB.

`alone` answers another quarter of the requests in each round. `same` tells how many answers are, token by
token, those of `alone`: all of them in float32, while in bfloat16 rounding may tip the choice between two
words of about the same likelihood. `--check` compares all of them: one round in float32, which fails if any
of ours differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import recorded
import vllm_peer
from generation_jobs import make_jobs
from generation_side import Result, Setup
from side_process import SideProcess
from side_ratio import Kind, Rates
from streamfleet_worker.engine import devices, models, smollm2

HERE = Path(__file__).parent
MAX_SEQ_LEN = 1024
LIMIT_S = 1800.0


SIDES = {
    "alone": Kind("generate, one by one", "generation_sides.py"),
    "static": Kind("generate, static batch", "generation_sides.py", 4.0),
    "transformers": Kind("transformers' batching", "generation_sides.py", 2.0),
    "vllm": Kind("vLLM, as it is", "vllm_side.py", 1.0),
    "vllm-compiled": Kind("vLLM, compiled", "vllm_side.py", 1.0),
    "forward": Kind("our forward alone", "generation_sides.py", 0.75),
    "ours": Kind("ours", "generation_sides.py"),
    "exact": Kind("ours, exact", "generation_sides.py", 0.95, ours_first=False),
    "fleet": Kind("ours, through Redis", "fleet_side.py", 0.97, ours_first=False),
}
CHECKED = ("alone", "ours", "exact")

Rounds = dict[str, list[Result]]


def command(name: str, setup: Path) -> list[str]:
    """How a side is started."""
    script = str(HERE / SIDES[name].script)
    if name.startswith("vllm"):
        return [str(vllm_peer.PYTHON), script, name, str(setup)]
    if name == "fleet":
        return [sys.executable, script, str(setup)]
    return [sys.executable, script, name, str(setup)]


def prepare(options: argparse.Namespace) -> Setup:
    """What the sides are given."""
    devices.set_threads(options.threads)
    loaded = models.load(options.model, "cpu", options.precision, pack=False)
    return Setup(
        model=options.model,
        folder=str(smollm2.folder(print)) if options.model == smollm2.ALIAS else options.model,
        precision=options.precision,
        threads=options.threads,
        batch=options.batch,
        max_seq_len=min(MAX_SEQ_LEN, loaded.max_positions),
        eos_token_ids=sorted(loaded.eos_token_ids),
        jobs=make_jobs(loaded.tokenizer, options.requests, options.scale),
        records=options.records is not None,
    )


def numbers(name: str, round_: int, options: argparse.Namespace) -> list[int]:
    """The jobs of one side in one round."""
    if name == "alone":
        return list(range(round_ % options.alone_share, options.requests, options.alone_share))
    return list(range(options.requests))


def measure(names: list[str], setup: Setup, options: argparse.Namespace) -> Rounds:
    """All rounds of all sides."""
    found: Rounds = {name: [] for name in names}
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "setup.json")
        setup.write(file)
        sides = {}
        for name in names:
            sides[name] = SideProcess(name, command(name, file), LIMIT_S)
            stack.callback(sides[name].stop)
            # One after the other: all at once, they would take minutes on few cores.
            sides[name].wait_ready()
        for round_ in range(options.rounds):
            for name, side in sides.items():
                result = Result(**side.ask(numbers(name, round_, options)))
                found[name].append(result)
                rate = result.tokens / result.seconds
                print(f"round {round_ + 1}: {name} {rate:.1f} tokens/s", file=sys.stderr, flush=True)
    return found


def same(name: str, rounds: Rounds, options: argparse.Namespace) -> tuple[int, int]:
    """Of how many answers that `alone` has given, too, how many are the same; in all rounds."""
    alone = {
        number: answer
        for round_, result in enumerate(rounds.get("alone", []))
        for number, answer in zip(numbers("alone", round_, options), result.answers, strict=True)
    }
    pairs = [
        (answer, alone[number])
        for round_, result in enumerate(rounds[name])
        if result.answers
        for number, answer in zip(numbers(name, round_, options), result.answers, strict=True)
        if number in alone
    ]
    return sum(answer == other for answer, other in pairs), len(pairs)


def rates(results: Sequence[Result]) -> list[Rates]:
    """Tokens of each round."""
    return [Rates.of(result.tokens, result.seconds, result.cpu_seconds) for result in results]


def summary(name: str, rounds: Rounds, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one side."""
    results = rounds[name]
    equal, compared = same(name, rounds, options)
    return {
        "tokens_per_s": statistics.median(rate.wall for rate in rates(results)),
        "tokens_per_cpu_s": statistics.median(rate.cpu for rate in rates(results)),
        "cpu_s": {
            part: statistics.median(r.cpu_seconds[part] for r in results) for part in results[0].cpu_seconds
        },
        "same": equal,
        "compared": compared,
        "goal": SIDES[name].goal,
        "ratio": {} if name == "ours" else SIDES[name].ratios(rates(rounds.get("ours", [])), rates(results)),
    }


HEAD = (
    f"{'':22} {'tokens':>7} {'tokens':>7} {'':>7}  {'ours by it, or it by ours':^25}\n"
    f"{'':22} {'/s':>7} {'/CPU-s':>7} {'same':>7} {'wall':>6} {'CPU':>6} {'CPU, range':>11} {'goal':>6}"
)


def line(name: str, figures: dict[str, Any]) -> str:
    """A row of the table, at most 80 columns."""
    kind = SIDES[name]
    equal = f"{figures['same']}/{figures['compared']}" if figures["compared"] else ""
    ratio = figures["ratio"]
    by_wall = f"{ratio['wall']['median']:.2f}" if ratio else ""
    by_cpu = f"{ratio['cpu']['median']:.2f}" if ratio else ""
    spread = f"{ratio['cpu']['least']:.2f}-{ratio['cpu']['most']:.2f}" if ratio else ""
    return (
        f"{kind.title:22} {figures['tokens_per_s']:7.1f} {figures['tokens_per_cpu_s']:7.1f} {equal:>7}"
        f" {by_wall:>6} {by_cpu:>6} {spread:>11} {kind.goal_words:>6}"
    )


def main() -> int:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=smollm2.ALIAS, help="the alias, or a folder")
    parser.add_argument("--precision", default="bfloat16", choices=[*devices.PRECISIONS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the answers' lengths")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--alone-share", type=int, default=4, help="rounds that `alone` takes for all requests"
    )
    parser.add_argument("--only", nargs="+", default=[*SIDES], choices=[*SIDES], metavar="SIDE")
    parser.add_argument("--skip", nargs="+", default=[], choices=[*SIDES], metavar="SIDE")
    parser.add_argument("--check", action="store_true")
    recorded.add_option(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    if options.check:
        options.precision, options.rounds, options.only = "float32", 1, [*CHECKED]
        options.alone_share = 1
    names = [name for name in SIDES if name in options.only and name not in options.skip]
    if any(name.startswith("vllm") for name in names):
        vllm_peer.prepare()
    setup = prepare(options)
    rounds = measure(names, setup, options)
    if options.records is not None:
        record(setup, rounds, options.records)
    found = {name: summary(name, rounds, options) for name in names}
    if options.json:
        results = {
            name: [{**asdict(result), "records": len(result.records)} for result in rounds[name]]
            for name in names
        }
        print(
            json.dumps(
                {
                    "settings": {**vars(options), "records": str(options.records)},
                    "sides": found,
                    "rounds": results,
                }
            )
        )
    else:
        report(setup, found, options)
    wrong = [name for name in CHECKED if name in found and found[name]["same"] < found[name]["compared"]]
    return 1 if options.check and wrong else 0


def record(setup: Setup, rounds: Rounds, folder: Path) -> None:
    """Write what the last round of each side was like, as far as the side can tell."""
    settings = {
        "model": setup.model,
        "precision": setup.precision,
        "threads": setup.threads,
        "batch": setup.batch,
        "requests": f"{len(setup.jobs)}, all there at once",
    }
    for name, results in rounds.items():
        if results[-1].records:
            recorded.write(folder, name, results[-1].records, settings, label=SIDES[name].title, loop="")
        else:
            print(f"{name} tells no times of single requests", file=sys.stderr)


def report(setup: Setup, found: dict[str, Any], options: argparse.Namespace) -> None:
    """The table."""
    prompts = sum(len(job.prompt_token_ids) for job in setup.jobs)
    print(
        f"{setup.model} {setup.precision}: {len(setup.jobs)} requests, {prompts} prompt tokens, "
        f"batch {setup.batch},\n{setup.threads} thread(s), medians of {options.rounds} round(s)\n{HEAD}"
    )
    for name, figures in found.items():
        print(line(name, figures))
    for name, figures in found.items():
        if len(figures["cpu_s"]) > 1:
            parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in figures["cpu_s"].items())
            print(f"{SIDES[name].title}: CPU seconds: {parts}")


if __name__ == "__main__":
    sys.exit(main())
