"""What the text of an answer costs: microseconds a token, for each way to get it.

    python tests/bench/detokenizer.py [--tokens 4000] [--rounds 5] [--json]

`pieces` is what the engine uses for this tokenizer, `detokenizer` the same with what is around it, also with
four stop strings; `window` is what it uses where tokens have no pieces; `DecodeStream` is the tokenizers
library's own, which neither finds stop strings nor can be flushed. The least of the rounds is taken, the ways
in turn. Each twice as many broken bytes should cost the same a token: if they do not, time is not linear.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

sys.path.insert(0, str(Path(__file__).parents[1]))

from streamfleet_worker.engine.detokenizer import Detokenizer
from streamfleet_worker.engine.incremental_decoder import WindowDecoder
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import build_tokenizer

STOPS = ("\n\n\n\n", "<END>", "Question:", "zzz")
HARD = "삼겹살 漢字かな交じり文 😀 🇩🇪🇫🇷 "
Way = Callable[[Sequence[int]], None]


def ways(source: Any, tokenizer: Tokenizer) -> dict[str, Way]:
    """How to read tokens, by name."""

    def pushed(make: Callable[[], Any]) -> Way:
        def read(ids: Sequence[int]) -> None:
            push = make().push
            for token_id in ids:
                push(token_id)

        return read

    def decode_stream(ids: Sequence[int]) -> None:
        stream, backend = DecodeStream(skip_special_tokens=True), source.backend_tokenizer
        for token_id in ids:
            stream.step(backend, token_id)

    return {
        "pieces": pushed(tokenizer.decoder),
        "detokenizer": pushed(lambda: Detokenizer(tokenizer.decoder())),
        "with 4 stops": pushed(lambda: Detokenizer(tokenizer.decoder(), STOPS)),
        "window": pushed(lambda: WindowDecoder(tokenizer.decode)),
        "DecodeStream": decode_stream,
    }


def texts(source: Any, tokenizer: Tokenizer, count: int) -> dict[str, list[int]]:
    """Token ids to read, by what they are."""
    code = tokenizer.encode(Path(argparse.__file__).read_text())
    hard = tokenizer.encode(HARD * (count // len(HARD.encode()) + 1))
    broken = source.convert_tokens_to_ids("å")  # which spells 0xE5, the first of three bytes
    return {
        "code": code[:count],
        "many bytes": hard[:count],
        "broken": [broken] * (count // 4),
        "broken, twice": [broken] * (count // 2),
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = build_tokenizer()
    tokenizer = Tokenizer(source)
    found: dict[str, dict[str, float]] = {}
    for text, ids in texts(source, tokenizer, options.tokens).items():
        row = found[text] = {}
        for _ in range(options.rounds):
            for name, read in ways(source, tokenizer).items():
                began = time.perf_counter()
                read(ids)
                cost_us = (time.perf_counter() - began) / len(ids) * 1e6
                row[name] = min(row.get(name, cost_us), cost_us)
    if options.json:
        print(json.dumps(found))
        return
    names = list(found["code"])
    print(f"{'µs a token':<16}" + "".join(f"{name:>14}" for name in names))
    for text, row in found.items():
        print(f"{text:<16}" + "".join(f"{row[name]:>14.2f}" for name in names))


if __name__ == "__main__":
    main()
