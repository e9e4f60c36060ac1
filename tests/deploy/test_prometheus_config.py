"""What Prometheus is told to scrape is what the services of the compose file serve."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "prometheus" / "prometheus.yml"
CONFIG: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
PORTS = {
    "exporter": "STREAMFLEET_EXPORTER_PORT",
    "gateway": "STREAMFLEET_GATEWAY_PORT",
    "worker": "STREAMFLEET_HTTP_PORT",
}


def test_each_service_with_a_page_is_scraped_at_its_port() -> None:
    told = {}
    for job in CONFIG["scrape_configs"]:
        ((found,), (name,)) = job["dns_sd_configs"], job["dns_sd_configs"][0]["names"]
        assert (job["job_name"], found["type"]) == (f"streamfleet-{name}", "A")
        told[name] = str(found["port"])

    assert told == {name: SERVICES[name]["environment"][variable] for name, variable in PORTS.items()}


def test_its_rules_are_ours() -> None:
    files = [(FILE.parent / name).resolve() for name in CONFIG["rule_files"]]

    assert files == [ROOT / "dashboards" / "rules" / name for name in ("recording.yml", "alerts.yml")]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_it(tmp_path: Path) -> None:
    planted = tmp_path / "planted.yml"
    planted.write_text(FILE.read_text().replace("dns_sd_configs", "dns_configs"))
    for file, status in ((FILE, 0), (planted, 1)):
        check = subprocess.run(["promtool", "check", "config", file], capture_output=True, check=False)
        assert check.returncode == status, check
