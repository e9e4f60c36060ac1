"""The manifests, checked without a cluster: by Kubernetes' schemas, and against what our processes read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from streamfleet_common.settings import FleetSettings
from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.cli.app import app
from streamfleet_producer.exporter.settings import ExporterSettings
from streamfleet_producer.gateway.health import OPERATIONS
from streamfleet_producer.gateway.server import GRACE_S
from streamfleet_producer.gateway.settings import GatewaySettings
from streamfleet_worker.settings import WorkerSettings

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.30"
"""The oldest one that is meant."""
DOCUMENTS = [
    document for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())
]
SETTINGS: dict[str, type[FleetSettings]] = {
    "gateway": GatewaySettings,
    "exporter": ExporterSettings,
    "bulk": BulkSettings,
    "cron": BulkSettings,
    "worker": WorkerSettings,
}


def named(document: dict[str, Any]) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def only(kind: str, name: str) -> dict[str, Any]:
    (found,) = (document for document in DOCUMENTS if named(document) == f"{kind}-streamfleet-{name}")
    return dict(found)


def pod(name: str) -> dict[str, Any]:
    return dict(only("Deployment", name)["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["containers"]
    return dict(found)


def variables(name: str) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container(name)["env"]}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_it_has_the_form_that_kubernetes_takes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_planted_error_is_found() -> None:
    text = (FOLDER / "gateway.yaml").read_text().replace("readinessProbe", "readynessProbe")

    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(next(yaml.safe_load_all(text)), VERSION, strict=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_its_variables_are_settings_that_are_read(name: str) -> None:
    for variable in variables(name):
        setting = variable.removeprefix("STREAMFLEET_").lower()
        assert setting in SETTINGS[name].model_fields or setting == "redis_url_file"
    # A Service called streamfleet-gateway would else set STREAMFLEET_GATEWAY_PORT to no port.
    assert pod(name)["enableServiceLinks"] is False


@pytest.mark.parametrize("name", SETTINGS)
def test_what_it_reads_and_writes_is_mounted(name: str) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}

    assert mounts.keys() == {volume["name"] for volume in pod(name)["volumes"]}
    for variable, value in variables(name).items():
        if variable.endswith(("_FILE", "_DIR", "_FOLDER")):
            assert any(value.startswith(path) for path in mounts.values())
    if name in ("gateway", "bulk"):
        assert mounts["files"] == "/files"


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_runs_as_root_or_writes_elsewhere(name: str) -> None:
    assert pod(name)["securityContext"]["runAsNonRoot"] is True
    assert pod(name)["securityContext"]["runAsUser"] == 10001
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_gateway_is_given_more_time_to_stop_than_it_takes() -> None:
    (_, pause) = container("gateway")["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = float(variables("gateway")["STREAMFLEET_DRAIN_TIMEOUT_S"])

    assert pod("gateway")["terminationGracePeriodSeconds"] > int(pause) + drain_s + GRACE_S


def test_a_worker_is_given_more_time_to_stop_than_it_drains() -> None:
    drain_s = float(variables("worker")["STREAMFLEET_DRAIN_TIMEOUT_S"])

    assert pod("worker")["terminationGracePeriodSeconds"] >= drain_s + 10


def test_probes_ask_what_the_gateway_answers() -> None:
    probes = {name: value for name, value in container("gateway").items() if name.endswith("Probe")}
    asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}

    assert asked == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert set(asked.values()) <= {operation.path for operation in OPERATIONS if operation.public}
    (port,) = container("gateway")["ports"]
    assert str(port["containerPort"]) == variables("gateway")["STREAMFLEET_GATEWAY_PORT"]


@pytest.mark.parametrize("name", ["gateway", "exporter", "worker"])
def test_prometheus_is_told_the_port_of_its_page(name: str) -> None:
    told = only("Deployment", name)["spec"]["template"]["metadata"]["annotations"]

    (port,) = container(name)["ports"]
    assert told == {"prometheus.io/scrape": "true", "prometheus.io/port": str(port["containerPort"])}
    ports = {"gateway": "GATEWAY_PORT", "exporter": "EXPORTER_PORT", "worker": "HTTP_PORT"}
    assert variables(name)[f"STREAMFLEET_{ports[name]}"] == str(port["containerPort"])


@pytest.mark.parametrize("name", ["gateway", "exporter", "bulk", "cron"])
def test_its_command_is_one_that_there_is(name: str) -> None:
    shown = CliRunner().invoke(app, [*container(name)["args"], "--help"])

    assert shown.exit_code == 0, shown.output


def test_service_and_scaler_find_their_pods() -> None:
    labels = only("Deployment", "gateway")["spec"]["template"]["metadata"]["labels"]
    assert only("Service", "gateway")["spec"]["selector"] == labels
    assert only("PodDisruptionBudget", "gateway")["spec"]["selector"]["matchLabels"] == labels
    scaled = only("HorizontalPodAutoscaler", "gateway")["spec"]["scaleTargetRef"]
    assert scaled == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "streamfleet-gateway"}
    (port,) = only("Service", "gateway")["spec"]["ports"]
    assert port["targetPort"] == container("gateway")["ports"][0]["name"]
