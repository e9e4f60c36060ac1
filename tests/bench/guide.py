"""The libraries for guided output side by side: what forms cost, which are kept, and what hostile ones do.

    guide.py [--model FOLDER] [--only costs features hostile]

`ours` is the engine's own compiler: llguidance behind limits. `llguidance` is the library alone, and
`xgrammar` the other one, which gets an environment of its own beside the peers of `fleet.py`, without its
dependencies: those that are here serve it. Hostile forms run in processes of their own, each for at most
`--limit` seconds. All times are the processor's, since others may be at work on it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import resource
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

from guide_forms import FEATURES, HOSTILE, REGEXES, SCHEMAS
from peers import FOLDER
from streamfleet_common import schemas
from streamfleet_common.errors import InvalidRequest, StreamfleetError, Unsupported
from streamfleet_worker.engine import smollm2
from streamfleet_worker.engine.guide_compiler import GuideCompiler
from streamfleet_worker.engine.tokenizer import Tokenizer

LIBRARIES = ("ours", "llguidance", "xgrammar")
XGRAMMAR = ("xgrammar==0.2.9", "apache-tvm-ffi==0.1.15.post2")
STEPS = 60
"""Random tokens by which a hostile form is followed."""


class Matcher(Protocol):
    def fill(self, bitmask: torch.Tensor) -> None: ...
    def accept(self, token_id: int) -> None: ...


Start = Callable[[], Matcher]


class Refused(Exception):
    """The form is not taken; says why."""


class Bench:
    """One library with one tokenizer."""

    def __init__(self, library: str, folder: str) -> None:
        source = AutoTokenizer.from_pretrained(folder)
        self.tokenizer = Tokenizer(source)
        self.vocab_size = -(-len(source) // 64) * 64
        self.end: int = source.eos_token_id
        self.mask = torch.zeros(1, -(-self.vocab_size // 32), dtype=torch.int32)
        began = time.process_time()
        self.compile: Callable[[schemas.Guide], Start] = getattr(self, f"_{library}")(source)
        self.compile(schemas.Guide(regex="warm"))
        self.started_ms = (time.process_time() - began) * 1e3

    def _ours(self, source: Any) -> Callable[[schemas.Guide], Start]:
        compiler = GuideCompiler(self.tokenizer, self.vocab_size, {self.end}, max_guides=0)

        def compile_form(form: schemas.Guide) -> Start:
            try:
                return compiler.compile(form).matcher
            except StreamfleetError as error:
                raise Refused(
                    ("unsupported: " if isinstance(error, Unsupported) else "") + str(error)
                ) from None

        return compile_form

    def _llguidance(self, source: Any) -> Callable[[schemas.Guide], Start]:
        import llguidance.hf  # noqa: PLC0415

        vocabulary = llguidance.hf.from_tokenizer(source, n_vocab=self.vocab_size)

        def compile_form(form: schemas.Guide) -> Start:
            kind, text = ("json_schema", form.json_schema) if form.json_schema else ("regex", form.regex)
            grammar = llguidance.grammar_from(kind, str(text))  # type: ignore[arg-type]
            first = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
            if first.is_error():
                raise Refused(first.get_error())

            class Bare:
                def __init__(self) -> None:
                    self.inner = first.deep_copy()

                def fill(self, bitmask: torch.Tensor) -> None:
                    self.inner.unsafe_compute_mask_ptr(bitmask.data_ptr(), bitmask.nbytes)
                    if self.inner.is_error():
                        raise RuntimeError(self.inner.get_error())

                def accept(self, token_id: int) -> None:
                    if not self.inner.consume_token(token_id):
                        raise RuntimeError(self.inner.get_error())

            return Bare

        return compile_form

    def _xgrammar(self, source: Any) -> Callable[[schemas.Guide], Start]:
        import xgrammar  # noqa: PLC0415

        info = xgrammar.TokenizerInfo.from_huggingface(
            source, vocab_size=self.vocab_size, stop_token_ids=[self.end]
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

        def compile_form(form: schemas.Guide) -> Start:
            try:
                if form.json_schema:
                    compiled = compiler.compile_json_schema(str(form.json_schema), strict_mode=False)
                else:
                    compiled = compiler.compile_regex(form.regex)
            except Exception as error:  # noqa: BLE001 - it has no kind of its own
                raise Refused(str(error)) from None

            class Other:
                def __init__(self) -> None:
                    self.inner = xgrammar.GrammarMatcher(compiled)

                def fill(self, bitmask: torch.Tensor) -> None:
                    bitmask.fill_(-1)  # it writes nothing where all is allowed
                    self.inner.fill_next_token_bitmask(bitmask[None])

                def accept(self, token_id: int) -> None:
                    if not self.inner.accept_token(token_id):
                        raise RuntimeError("not accepted")

            return Other

        return compile_form

    # --- what is measured

    def costs(self, schema: Any, document: Any) -> dict[str, float]:
        """Milliseconds to compile, microseconds for masks on the way through a document."""
        form = schemas.Guide(json_schema=schema)
        compiling, filling, accepting = [], [], []
        for _ in range(7):
            began = time.process_time()
            start = self.compile(form)
            matcher = start()
            compiling.append((time.process_time() - began) * 1e3)
            for token_id in self.tokenizer.encode_piece(json.dumps(document, ensure_ascii=False)):
                began = time.process_time()
                matcher.fill(self.mask[0])
                filled = time.process_time()
                matcher.accept(token_id)
                filling.append((filled - began) * 1e6)
                accepting.append((time.process_time() - filled) * 1e6)
        filling.sort()
        return {
            "compile ms": statistics.median(compiling),
            "mask us": statistics.mean(filling),
            "p99 us": filling[len(filling) * 99 // 100],
            "accept us": statistics.mean(accepting),
        }

    def allows(self, token_id: int) -> bool:
        return bool(self.mask[0, token_id // 32] >> token_id % 32 & 1)

    def fits(self, start: Start, text: str) -> bool:
        """Whether the masks let an answer through, and an end behind it."""
        matcher = start()
        for token_id in self.tokenizer.encode_piece(text):
            matcher.fill(self.mask[0])
            if not self.allows(token_id):
                return False
            matcher.accept(token_id)
        matcher.fill(self.mask[0])
        return self.allows(self.end)

    def verdict(self, form: schemas.Guide, good: Sequence[str], bad: Sequence[str]) -> str:
        try:
            start = self.compile(form)
        except Refused:
            return "refused"
        try:
            lost = [text for text in good if not self.fits(start, text)]
            let_in = [text for text in bad if self.fits(start, text)]
        except Exception:  # noqa: BLE001 - of whatever kind, it comes too late
            return "FAILS"
        if let_in:
            return f"LETS IN {let_in[0]}"
        return f"loses {lost[0]}" if lost else "kept"

    def hostile(self, name: str, limit_s: int) -> dict[str, Any]:
        """What compiling and some random steps take."""
        spent = math.ceil(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent + limit_s, spent + limit_s + 1))
        before, began = memory_mb(), time.process_time()
        try:
            form = schemas.Guide(**HOSTILE[name])
            start = self.compile(form)
        except (Refused, InvalidRequest) as error:
            return {"refused in ms": (time.process_time() - began) * 1e3, "why": str(error)[:200]}
        found = {"compiled in ms": (time.process_time() - began) * 1e3}
        chance, slowest, matcher = random.Random(0), 0.0, start()
        try:
            for _ in range(STEPS):
                began = time.process_time()
                matcher.fill(self.mask[0])
                slowest = max(slowest, (time.process_time() - began) * 1e3)
                bits = self.mask[0][:, None] >> torch.arange(32) & 1
                allowed = [i for i in bits.flatten().nonzero().flatten().tolist() if i != self.end]
                if not allowed:
                    break
                matcher.accept(chance.choice(allowed))
        except Exception as error:  # noqa: BLE001
            return {
                **found,
                "mask ms": slowest,
                "MB": memory_mb() - before,
                "fails": str(error).splitlines()[0][:100],
            }
        return {**found, "mask ms": slowest, "MB": memory_mb() - before}


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def python_of(library: str) -> str:
    """The interpreter that has a library, made if need be."""
    if library != "xgrammar" or importlib.util.find_spec("xgrammar"):
        return sys.executable
    folder = FOLDER / "xgrammar"
    python = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(XGRAMMAR):
        print(f"installing xgrammar in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *XGRAMMAR], check=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        here = sysconfig.get_paths()["purelib"]
        (site / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        stamp.write_text("\n".join(XGRAMMAR))
    return str(python)


def ask(library: str, part: str, arguments: Sequence[str]) -> Any:
    """One part in a process of its own; a word where it does not end well."""
    command = [python_of(library), __file__, "--library", library, "--part", part, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    if done.returncode == -signal.SIGXCPU:
        return "does not end in time"
    if done.returncode:
        return f"ends with {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


def answer(bench: Bench, part: str, name: str, limit_s: int) -> Any:
    if part == "costs":
        costs = {name: bench.costs(schema, document) for name, (schema, document) in SCHEMAS.items()}
        return {"start ms": bench.started_ms, "forms": costs}
    if part == "features":
        found = {
            name: bench.verdict(schemas.Guide(json_schema=s), good, bad) for name, s, good, bad in FEATURES
        }
        regexes = {f"regex {name}": bench.verdict(schemas.Guide(regex=r), g, b) for name, r, g, b in REGEXES}
        return found | regexes
    return bench.hostile(name, limit_s)


def show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(item)}" for key, item in value.items() if key != "why")
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder with a tokenizer; smollm2 if none is named")
    parser.add_argument("--only", nargs="*", default=["costs", "features", "hostile"])
    parser.add_argument("--libraries", nargs="*", default=LIBRARIES)
    parser.add_argument("--limit", type=int, default=20, help="seconds for one hostile form")
    parser.add_argument("--json", action="store_true")
    for inner in ("--library", "--part", "--name"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.model or str(smollm2.folder(lambda line: print(line, file=sys.stderr)))
    if options.library:
        print(json.dumps(answer(Bench(options.library, folder), options.part, options.name, options.limit)))
        return
    found: dict[str, Any] = {}
    for part in options.only:
        for name in HOSTILE if part == "hostile" else [part]:
            rest = ["--model", folder, "--name", name, "--limit", str(options.limit)]
            rows = {library: ask(library, part, rest) for library in options.libraries}
            found[name] = rows
            if not options.json:
                print(f"\n{name}")
                for library, row in rows.items():
                    print(
                        f"  {library:10} {show(row)}" if part == "hostile" else f"  {library}: {row}",
                        flush=True,
                    )
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
