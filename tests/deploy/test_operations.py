"""What the documentation of operations says of gateways, bulk workers and exporters is what they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from streamfleet_common.settings import FleetSettings
from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.exporter.settings import ExporterSettings
from streamfleet_producer.gateway.metrics import GatewayMetrics
from streamfleet_producer.gateway.settings import GatewaySettings

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "operations.md").read_text()
SHARED = {"redis_url", "durability"}
BULK = {"rq_url", "rq_queue"}
UNSAID = {"queue"}
"""Of every part's settings, and read by the command line alone."""


def section(title: str) -> str:
    (found,) = (part for part in re.split(r"^## ", DOCS, flags=re.MULTILINE) if part.startswith(title + "\n"))
    return found


def rows(title: str) -> dict[str, str]:
    """Settings by field name, with their defaults as they are written."""
    found = re.findall(r"^\| `STREAMFLEET_(\w+)` \| ([^|]+) \|", section(title), re.MULTILINE)
    return {name.lower(): default.strip(" `") for name, default in found}


def written(default: Any) -> str:
    if default in (None, (), {}, ""):
        return "none"
    return f"{default:.0f}" if isinstance(default, float) and default.is_integer() else str(default)


@pytest.mark.parametrize(
    ("title", "kind", "elsewhere"),
    [
        (
            "The HTTP gateway",
            GatewaySettings,
            SHARED | BULK | {"drain_timeout_s", "log_format", "log_level"},
        ),
        ("Bulk workers", BulkSettings, SHARED),
        ("The exporter", ExporterSettings, {"redis_url", "log_format", "log_level"}),
    ],
)
def test_the_tables_have_all_settings_and_their_defaults(
    title: str, kind: type[FleetSettings], elsewhere: set[str]
) -> None:
    told, fields = rows(title), kind.model_fields

    assert told.keys() == fields.keys() - elsewhere - UNSAID - (SHARED - elsewhere)
    assert told == {name: written(fields[name].get_default(call_default_factory=True)) for name in told}
    for name in elsewhere:
        assert f"`STREAMFLEET_{name.upper()}`" in section(title)


def test_all_series_of_a_gateway_are_told_and_no_others() -> None:
    families = {family.name for family in GatewayMetrics().registry.collect()}
    told = set(re.findall(r"`streamfleet_gateway_(\w+)", DOCS))

    assert {f"streamfleet_gateway_{name.removesuffix('_total')}" for name in told} == families


def test_what_lies_in_deploy_is_told() -> None:
    told = set(re.findall(r"^\| `([\w./]+)` \|", section("What lies in `deploy`"), re.MULTILINE))

    assert {name.rstrip("/") for name in told} <= {path.name for path in (ROOT / "deploy").iterdir()}
    assert {"Dockerfile", "compose.yaml", "kubernetes/", "systemd/", "prometheus/", "nginx.conf"} <= told
