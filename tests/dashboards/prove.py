"""That dashboards and rules show a fleet: a real Prometheus scrapes real processes under load.

python tests/dashboards/prove.py                          # two minutes of load; 1 if a query has no answer
python tests/dashboards/prove.py --picture docs/images    # and draws what each dashboard shows
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from board_queries import BOARDS, Panel, legend, panels
from drawn_panels import Drawn, draw
from prometheus_process import WINDOW, Prometheus, Series, wait_for
from proof_fleet import CHAT, LEASE_S, PAUSED, QUEUES, ProofFleet
from proof_load import Load, leave_waiting

HURRY = "10s"
"""In the place of each alert's `for:`."""
PAUSE_S = 3 * LEASE_S
PAUSED_AT = 0.4
"""After what share of the load a worker is stopped, for `PAUSE_S`."""
OPEN = 70
SERIES = re.compile(r"\bstreamfleet_\w+|\b\w+:streamfleet_\w+:\w+")


def main() -> int:
    """Prove it; 1 if a panel or a rule has nothing to show, or an alert does not fire that should."""
    parser = argparse.ArgumentParser(description="Prove that dashboards and rules show a fleet under load.")
    parser.add_argument("--seconds", type=float, default=120, help="how long the load goes on")
    parser.add_argument("--picture", type=Path, metavar="FOLDER", help="draw each dashboard there")
    parser.add_argument("--folder", type=Path, help="where logs and data of the run are kept")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with (
            ProofFleet(folder) as fleet,
            Prometheus(folder / "prometheus", fleet.ports, pause=HURRY) as prometheus,
        ):
            print(f"fleet of {', '.join(fleet.ports)}; load for {asked.seconds:.0f} s")
            wait_for(
                lambda: len(prometheus.now("up == 1")) == len(fleet.ports),
                lambda: f"a scrape of {prometheus.down()}",
            )
            started = time.time()
            done = asyncio.run(_load(fleet, asked.seconds))
            print("load:", ", ".join(f"{count} {what}" for what, count in sorted(done.items())))
            ended = started + asked.seconds
            drawn = {board: _ask(prometheus, board, started, ended) for board in BOARDS}
            lacking = [line for board in BOARDS for line in _tell(board, drawn[board])]
            lacking += _tell_rules(prometheus, started, ended) + _tell_targets(prometheus)
            _tell_alerts(prometheus, started, ended)
            for board in BOARDS if asked.picture else ():
                path = asked.picture / f"{board}.png"
                draw(f"streamfleet: {board}", drawn[board], started, ended, path, note=_note(asked.seconds))
            lacking += _unserved(fleet, prometheus)
    for line in lacking:
        print("LACKING:", line)
    return 1 if lacking else 0


def _note(seconds: float) -> str:
    begun, over = PAUSED_AT * seconds, PAUSED_AT * seconds + PAUSE_S
    return (
        f"Minutes and seconds since the load began. From {begun // 60:.0f}:{begun % 60:02.0f} to "
        f"{over // 60:.0f}:{over % 60:02.0f} the worker {PAUSED} stands still."
    )


async def _load(fleet: ProofFleet, seconds: float) -> Mapping[str, int]:
    """Load, amid which one worker stands still for longer than its lease."""
    load = Load(fleet.url, fleet.gateway, seed=7)
    running = asyncio.create_task(load.run())
    for act, after_s in (
        (fleet.pause, PAUSED_AT * seconds),
        (fleet.resume, PAUSE_S),
        (load.stop, (1 - PAUSED_AT) * seconds - PAUSE_S),
    ):
        await asyncio.wait([running], timeout=after_s)
        act()
    await running
    return load.done


def _ask(prometheus: Prometheus, board: str, started: float, ended: float) -> list[Drawn]:
    """All panels of a dashboard with what their queries give."""
    values = {
        "queue": CHAT if board == "queue" else "|".join(QUEUES),
        "instance": ".+",
        "worker": ".+",
        "__rate_interval": WINDOW,
    }
    return [_answered(prometheus, panel, started, ended) for panel in panels(board, values)]


def _answered(prometheus: Prometheus, panel: Panel, started: float, ended: float) -> Drawn:
    curves = []
    for expression, form in panel.targets:
        found = prometheus.over(expression, started, ended)
        curves.append([(legend(form, series.labels), _told(series)) for series in found])
    return Drawn(panel, curves)


def _told(series: Series) -> Series:
    """A series without what is no number: a quantile of nothing."""
    return Series(series.labels, tuple(point for point in series.points if math.isfinite(point[1])))


def _tell(board: str, drawn: list[Drawn]) -> list[str]:
    """Print each panel with its series and points; gives those of its queries that have none."""
    lacking = []
    print(f"\n{board}\n{'panel':<32}{'series':>8}{'points':>8}")
    for one in drawn:
        if one.panel.kind == "row":
            continue
        found = [series for target in one.curves for _, series in target if series.points]
        print(f"{one.panel.title:<32}{len(found):>8}{sum(len(series.points) for series in found):>8}")
        for (expression, _), target in zip(one.panel.targets, one.curves, strict=True):
            if not any(series.points for _, series in target):
                lacking.append(f"{board}: {one.panel.title}: {expression}")
    return lacking


def _tell_rules(prometheus: Prometheus, started: float, ended: float) -> list[str]:
    """The same of rules; an alert that does not fire has no value, but all series that it looks at."""
    lacking = []
    print(f"\n{'rule':<62}{'series':>8}{'points':>8}")
    for rule in prometheus.rules():
        if rule["health"] != "ok":
            lacking.append(f"rule {rule['name']}: {rule.get('lastError')}")
        is_alert = rule["type"] == "alerting"
        wanted = sorted(set(SERIES.findall(rule["query"]))) if is_alert else [rule["name"]]
        answers = {name: prometheus.over(name, started, ended) for name in wanted}
        found = [series for answer in answers.values() for one in answer if (series := _told(one)).points]
        points = sum(len(series.points) for series in found)
        print(f"{rule['name']:<62}{len(found):>8}{points:>8}")
        lacking += [f"rule {rule['name']}: {name}" for name, answer in answers.items() if not answer]
    return lacking


def _tell_alerts(prometheus: Prometheus, started: float, ended: float) -> None:
    fired = prometheus.over('ALERTS{alertstate="firing"}', started, ended)
    names = sorted({f"{one.labels['alertname']} ({one.labels.get('queue', 'all')})" for one in fired})
    print(f"\nfired meanwhile: {', '.join(names) or 'nothing'}")


def _tell_targets(prometheus: Prometheus) -> list[str]:
    return [f"scrape of {why}" for why in prometheus.down()]


def _unserved(fleet: ProofFleet, prometheus: Prometheus) -> list[str]:
    """Kill all workers with 70 requests open; gives what the exporter or the alert does not tell of that."""

    def value(expression: str) -> float:
        return sum(series.points[0][1] for series in prometheus.now(expression))

    def depth(state: str) -> float:
        return value(f'streamfleet_queue_depth{{queue="{CHAT}", state="{state}"}}')

    def firing(name: str) -> list[str]:
        return [
            alert["annotations"]["summary"]
            for alert in prometheus.alerts()
            if alert["labels"]["alertname"] == name and alert["state"] == "firing"
        ]

    wait_for(lambda: depth("queued") + depth("running") == 0, lambda: "the end of the load")
    asyncio.run(leave_waiting(fleet.url, OPEN))
    wait_for(
        lambda: depth("queued") + depth("running") == OPEN,
        lambda: f"{OPEN} open requests, not {depth('queued'):.0f} queued and {depth('running'):.0f} running",
    )
    fleet.kill_workers()
    killed = time.time()
    wait_for(
        lambda: value(f'streamfleet_queue_workers{{queue="{CHAT}"}}') == 0,
        lambda: "the end of the workers' cards",
    )
    age = f'max(streamfleet_queue_oldest_age_seconds{{queue="{CHAT}"}})'
    before = value(age)
    print(f"\nall workers killed with {depth('queued'):.0f} queued and {depth('running'):.0f} running")
    wait_for(lambda: firing("StreamfleetQueueUnserved"), lambda: "the alert that nobody serves")
    wait_for(lambda: value(age) > before, lambda: "a growing age of the oldest request")
    told = depth("queued") + depth("running")
    print(f"firing after {time.time() - killed:.0f} s: {firing('StreamfleetQueueUnserved')[0]}")
    print(f"the exporter shows {told:.0f} open; the oldest waits for {before:.0f} s, then {value(age):.0f} s")
    return [] if told == OPEN else [f"{told:.0f} open requests after the workers' death, not {OPEN}"]


if __name__ == "__main__":
    sys.exit(main())
