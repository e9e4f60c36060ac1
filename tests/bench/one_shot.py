"""One-shot work on one machine, ours beside others: vectors of texts, and calls of handlers.

    python tests/bench/one_shot.py [--rounds 3] [--json]
    python tests/bench/one_shot.py --part embed --only ours sentence --precision bfloat16
    python tests/bench/one_shot.py --part call --only streamfleet mosec --handlers noop --in-flight 256

`embed`: MiniLM for texts with the lengths that texts have, other ones in each round: one by one, in batches
as they arrive, with sentence-transformers' `encode`, with our engine in process, and through Redis with one
worker and one client. Each side is a process of its own. They take turns, round by round, while the others
idle; no figure counts unless all its vectors are right. `call`: a handler that does nothing and one that
takes 5 ms a batch, served by us and by LitServe, mosec and Ray Serve with the same largest batch and the same
delay, one worker each, one after the other, several rounds in turn. How each peer is set, its
`*_handlers.py` says. `CPU µs a request` are client and all processes of the system together; `others` are the
cores that everything else on the machine took meanwhile.

The ratio counts, not the absolute figures, since machines differ and are shared. What the systems do differs:
we admit, fence, persist and push; none of the three does any of that. The peers are installed at the first
run, 2 GB; they are loaded by wrk, from the system's packages. Where the time of our own calls goes,
`hotspots.py --handler` tells.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import ModuleType

import one_shot_calls
import one_shot_embed
from one_shot_handlers import HANDLERS
from server import add_options
from streamfleet_worker.engine import devices

PARTS: dict[str, ModuleType] = {"embed": one_shot_embed, "call": one_shot_calls}
SIDES = {"embed": [*one_shot_embed.SIDES], "call": [*one_shot_calls.SYSTEMS]}
ALL = [side for sides in SIDES.values() for side in sides]


def main() -> int:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=ALL, choices=ALL, metavar="SIDE", help=", ".join(ALL))
    parser.add_argument("--skip", nargs="+", default=[], choices=ALL, metavar="SIDE")
    parser.add_argument("--json", action="store_true")
    embed = parser.add_argument_group("embed")
    embed.add_argument("--texts", type=int, default=512, help="of each round")
    embed.add_argument("--batch", type=int, default=32)
    embed.add_argument("--precision", default="float32", choices=[*devices.PRECISIONS])
    embed.add_argument("--threads", type=int, default=1)
    call = parser.add_argument_group("call")
    call.add_argument("--handlers", nargs="+", default=[*HANDLERS], choices=[*HANDLERS])
    call.add_argument("--in-flight", nargs="+", type=int, default=[1, 32, 256])
    call.add_argument("--seconds", type=float, default=5.0, help="of each load")
    call.add_argument("--handler-batch", type=int, default=16, help="max_batch_size of the handlers")
    call.add_argument("--delay-ms", type=int, default=10)
    add_options(parser)
    options = parser.parse_args()

    results = {}
    for part in options.part:
        names = [name for name in SIDES[part] if name in options.only and name not in options.skip]
        if names:
            results[part] = PARTS[part].measure(names, options)
            if not options.json:
                PARTS[part].report(results[part], options)
    if options.json:
        print(json.dumps({"settings": vars(options), **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
