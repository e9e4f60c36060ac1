"""The units, checked by systemd itself where it is installed, and against what our processes read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.cli.app import app
from streamfleet_producer.exporter.settings import ExporterSettings
from streamfleet_producer.gateway.process import WRONG_SETTINGS
from streamfleet_producer.gateway.server import GRACE_S
from streamfleet_producer.gateway.settings import GatewaySettings

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")


def service(unit: Path) -> dict[str, str]:
    """The section [Service]; values of a name that comes several times are joined by spaces."""
    (section,) = (part for part in unit.read_text().split("\n[") if part.startswith("Service]"))
    found: dict[str, str] = {}
    for line in section.splitlines()[1:]:
        name, equals, value = line.partition("=")
        if equals and not name.startswith("#"):
            found[name] = f"{found[name]} {value}" if name in found else value
    return found


def variables(unit: Path) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in service(unit)["Environment"].split())


def test_there_is_one_for_each_process() -> None:
    names = [unit.name for unit in UNITS]

    parts = ("bulk@", "cron", "exporter", "gateway")
    assert names == [f"streamfleet-{part}.service" for part in parts]


@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    assert ANALYZE is not None
    for unit in UNITS:
        # The program that it names is not installed here.
        text = unit.read_text().replace("ExecStart=/opt/streamfleet/bin/streamfleet", "ExecStart=/bin/true")
        (tmp_path / unit.name).write_text(text)
    planted = tmp_path / "planted.service"
    planted.write_text("[Service]\nExecStart=/bin/true\nTimeoutStopSecs=45\n")

    def said(*paths: Path) -> str:
        done = subprocess.run(
            [ANALYZE, "verify", *map(str, paths)], capture_output=True, text=True, check=False
        )
        return "".join(line for line in done.stderr.splitlines(keepends=True) if str(tmp_path) in line)

    assert said(*(tmp_path / unit.name for unit in UNITS)) == ""
    assert "TimeoutStopSecs" in said(planted)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_its_variables_and_its_command_are_known(unit: Path) -> None:
    known = {"redis_url_file"}
    for settings in (GatewaySettings, BulkSettings, ExporterSettings):
        known |= settings.model_fields.keys()
    for variable in variables(unit):
        assert variable.removeprefix("STREAMFLEET_").lower() in known

    program, *arguments = service(unit)["ExecStart"].split()
    assert program == "/opt/streamfleet/bin/streamfleet"
    shown = CliRunner().invoke(app, [*arguments, "--help"])
    assert shown.exit_code == 0, shown.output


def test_wrong_settings_are_not_tried_again() -> None:
    for unit in UNITS:
        assert service(unit)["RestartPreventExitStatus"] == str(WRONG_SETTINGS)


def test_the_gateway_is_given_more_time_to_stop_than_it_takes() -> None:
    unit = FOLDER / "streamfleet-gateway.service"
    drain_s = float(variables(unit)["STREAMFLEET_DRAIN_TIMEOUT_S"])

    assert int(service(unit)["TimeoutStopSec"]) > drain_s + GRACE_S
    assert int(service(unit)["LimitNOFILE"]) > GatewaySettings.model_fields["max_connections"].default
