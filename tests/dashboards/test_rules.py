"""The rules are sound, fire when they should, and each alert has its paragraph for who is woken by it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from served_series import asked_for, recorded_ones, served
from streamfleet_producer.cli.app import app

ROOT = Path(__file__).parents[2]
RULES = ROOT / "dashboards" / "rules"
CASES = sorted((RULES / "tests").glob("*.yml"))
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: the package prometheus)"
)


def rules(name: str | Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}


def paragraphs() -> dict[str, str]:
    """What operations.md says of alerts, by alert."""
    (section,) = re.findall(r"^## Alerts\n(.*?)^## ", OPERATIONS, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL))


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, cwd=RULES / "tests"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", RULES / "recording.yml", RULES / "alerts.yml")


@needs_promtool
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.name)
def test_alerts_fire_when_they_should_and_at_no_other_time(cases: Path) -> None:
    promtool("test", "rules", cases)


@needs_promtool
def test_a_changed_rule_fails_its_tests(tmp_path: Path) -> None:
    shutil.copytree(RULES, tmp_path / "rules")
    alerts = tmp_path / "rules" / "alerts.yml"
    alerts.write_text(alerts.read_text().replace("for: 2m", "for: 20m"))

    with pytest.raises(AssertionError, match="StreamfleetQueueUnserved"):
        promtool("test", "rules", tmp_path / "rules" / "tests" / "queues.yml")


def test_each_alert_is_tested_both_ways() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for path in CASES:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for test in case.get("alert_rule_test", ()):
                (fires if test["exp_alerts"] else silent).add(test["alertname"])

    assert fires == ALERTS.keys()
    assert silent == ALERTS.keys()


def test_each_alert_has_its_paragraph_and_each_paragraph_its_alert() -> None:
    assert paragraphs().keys() == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_it_is_how_bad_and_where_to_read_on(name: str) -> None:
    alert = ALERTS[name]

    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert "$value" in alert["annotations"]["description"]
    assert alert["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
    assert re.search(r"^\* ", paragraphs()[name], re.MULTILINE), "nothing to do"


def test_copies_name_the_paragraphs_where_they_can_be_read(tmp_path: Path) -> None:
    build = [sys.executable, str(RULES.parent / "build.py")]
    where = ["--rules", str(tmp_path), "--runbooks", "https://example.org/it"]
    done = subprocess.run([*build, *where], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    copied = {rule["alert"]: rule for rule in rules(tmp_path / "alerts.yml")}
    assert copied.keys() == ALERTS.keys()
    for name, rule in copied.items():
        wanted = f"https://example.org/it/docs/operations.md#{name.lower()}"
        assert rule == ALERTS[name] | {"annotations": ALERTS[name]["annotations"] | {"runbook_url": wanted}}
    assert rules(tmp_path / "recording.yml") == rules("recording.yml")


@pytest.mark.parametrize("file", ["recording.yml", "alerts.yml"])
def test_every_metric_asked_for_is_served(file: str) -> None:
    wanted = {name for rule in rules(file) for name in asked_for(rule["expr"])}

    assert wanted
    assert wanted <= served()


def test_every_recorded_rule_asked_for_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules("recording.yml")}
    wanted = {
        name for rule in rules("recording.yml") + rules("alerts.yml") for name in recorded_ones(rule["expr"])
    }

    assert wanted <= recorded


def test_the_commands_of_a_paragraph_are_ones_that_the_command_line_takes() -> None:
    lines = {line for text in paragraphs().values() for line in re.findall(r"`streamfleet ([^`]+)`", text)}

    assert {"top", "doctor", "explain ID", "pause QUEUE", "drain QUEUE WORKER"} <= lines
    for line in lines:
        words = line.split()
        command, context = get_command(app), None
        while isinstance(command, TyperGroup):
            context = command.make_context(command.name, words, parent=context)
            _, found, words = command.resolve_command(context, words)
            assert found is not None, line
            command = found
        command.make_context(command.name, words, parent=context)
