"""Writes the Grafana dashboards in this folder; the JSON is committed, so that importing needs nothing else.

python dashboards/build.py           # write
python dashboards/build.py --check   # say whether what is committed is up to date

And copies of the rules for a Prometheus whose alerts are read where there is no checkout:

python dashboards/build.py --rules /etc/prometheus/streamfleet --runbooks https://example.org/streamfleet/
"""

from __future__ import annotations

import argparse
import json
import re
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
RULES = ("recording.yml", "alerts.yml")


def render(make: Any) -> str:
    """The JSON of a dashboard, with a line feed at its end."""
    plain = json.loads(JSONEncoder().encode(make().build()))
    # The SDK leaves both to Grafana, which wants ids unique, and the queries of a panel told apart.
    for place, panel in enumerate(plain["panels"], 1):
        panel["id"] = place
        for letter, target in zip(string.ascii_uppercase, panel.get("targets", ()), strict=False):
            target["refId"] = letter
    return json.dumps(plain, sort_keys=True, indent=2) + "\n"


def address(text: str) -> str:
    """An address under which there is a `docs/`, with a slash at its end."""
    if not re.fullmatch(r"https?://[^\s#]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address: https://…")
    return text.rstrip("/") + "/"


def copy_rules(folder: Path, runbooks: str) -> None:
    """Write the rules there, their alerts' `runbook_url` under this address."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in RULES:
        rules = (FOLDER / "rules" / name).read_text()
        (folder / name).write_text(rules.replace("runbook_url: docs/", f"runbook_url: {runbooks}docs/"))


def main() -> int:
    """Write the dashboards, or with --check compare; 1 if what is committed is not up to date."""
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards, or copies of the rules.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument(
        "--rules", type=Path, metavar="FOLDER", help="write the rules there, and nothing else"
    )
    parser.add_argument(
        "--runbooks",
        type=address,
        metavar="URL",
        help="of those, where their `docs/` can be read; as they are, alerts name a file of the checkout",
    )
    asked = parser.parse_args()
    if asked.rules is not None:
        copy_rules(asked.rules, asked.runbooks or "")
        return 0
    if asked.runbooks is not None:
        parser.error("--runbooks is for copies: say with --rules where they are to lie")
    check = asked.check
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
