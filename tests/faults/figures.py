"""What the tests of faults measure, one line a fault: printed, and kept where that is asked for.

With `FAULT_FIGURES` set to a file, each line takes the place of the one that the file has of the same fault:

    FAULT_FIGURES=tests/faults/FIGURES make test-all ARGS="-n 0 tests/faults -s"
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

VARIABLE = "FAULT_FIGURES"
_PLACE = re.compile(r"F(\d+)")


def keep(fault: str, what: str, found: str, target: str) -> None:
    """Say what came of a fault. `fault` is its number and kind, unique to one measurement."""
    line = f"{fault} | {what} | {found} | target: {target}"
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()
    if place := os.environ.get(VARIABLE):
        path = Path(place)
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [old for old in lines if old.partition(" | ")[0] != fault]
        path.write_text("\n".join(sorted([*kept, line], key=_order)) + "\n")


def _order(line: str) -> tuple[int, str]:
    found = _PLACE.match(line)
    return (int(found[1]) if found else 0, line)
