"""Writes the Grafana dashboards in this folder; the JSON is committed, so that importing needs nothing else.

python dashboards/build.py           # write
python dashboards/build.py --check   # say whether what is committed is up to date
"""

from __future__ import annotations

import argparse
import json
import string
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from fleet_board import fleet
from queue_board import queue
from worker_board import worker

FOLDER = Path(__file__).parent
DASHBOARDS = {"fleet.json": fleet, "queue.json": queue, "worker.json": worker}


def render(make: Any) -> str:
    """The JSON of a dashboard, with a line feed at its end."""
    plain = json.loads(JSONEncoder().encode(make().build()))
    # The SDK leaves both to Grafana, which wants ids unique, and the queries of a panel told apart.
    for place, panel in enumerate(plain["panels"], 1):
        panel["id"] = place
        for letter, target in zip(string.ascii_uppercase, panel.get("targets", ()), strict=False):
            target["refId"] = letter
    return json.dumps(plain, sort_keys=True, indent=2) + "\n"


def main() -> int:
    """Write the dashboards, or with --check compare; 1 if what is committed is not up to date."""
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = [
        name
        for name, make in DASHBOARDS.items()
        if not (path := FOLDER / name).exists() or path.read_text() != render(make)
    ]
    for name in [] if check else stale:
        (FOLDER / name).write_text(render(DASHBOARDS[name]))
    for name in stale:
        print(f"{name}: {'not up to date; run python dashboards/build.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
