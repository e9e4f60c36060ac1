"""The scaler of workers: no KEDA is here to look at it, so each of its fields is held to a list."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from streamfleet_common.figures import Figures, QueueFigures
from streamfleet_producer.exporter.metrics import page_of
from streamfleet_producer.exporter.reading import Reading

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
FILE = FOLDER / "keda" / "worker.yaml"
SCALER: dict[str, Any] = yaml.safe_load(FILE.read_text())
WORKER: dict[str, Any] = yaml.safe_load((FOLDER / "worker.yaml").read_text())
KNOWN: dict[str, set[str]] = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "metadata": {"name", "labels", "annotations"},
    "spec": {
        *("scaleTargetRef", "pollingInterval", "cooldownPeriod", "initialCooldownPeriod", "idleReplicaCount"),
        *("minReplicaCount", "maxReplicaCount", "fallback", "advanced", "triggers"),
    },
    "spec.scaleTargetRef": {"apiVersion", "kind", "name", "envSourceContainerName"},
    "spec.fallback": {"failureThreshold", "replicas", "behavior"},
    "spec.advanced": {"restoreToOriginalReplicaCount", "horizontalPodAutoscalerConfig", "scalingModifiers"},
    "spec.advanced.horizontalPodAutoscalerConfig": {"name", "behavior"},
}
"""By KEDA's reference of ScaledObjects; what stands below `behavior` is Kubernetes' own."""
TRIGGER = {"type", "name", "metricType", "useCachedMetrics", "authenticationRef", "metadata"}
PROMETHEUS = {
    *("serverAddress", "query", "queryParameters", "threshold", "activationThreshold", "namespace"),
    *("customHeaders", "ignoreNullValues", "unsafeSsl", "timeout", "authModes"),
}
TRIGGERS: list[dict[str, Any]] = SCALER["spec"]["triggers"]


def unknown(document: dict[str, Any]) -> set[str]:
    """Fields that KEDA would not know, by their paths."""
    found = set()
    for path, names in KNOWN.items():
        part = document
        for name in path.split(".") if path else ():
            part = part.get(name, {})
        found |= {f"{path}.{name}" for name in part.keys() - names}
    for trigger in document["spec"]["triggers"]:
        found |= {f"trigger.{name}" for name in trigger.keys() - TRIGGER}
        found |= {f"metadata.{name}" for name in trigger["metadata"].keys() - PROMETHEUS}
    return found


def test_it_has_no_field_that_keda_does_not_know() -> None:
    assert unknown(SCALER) == set()
    assert (SCALER["apiVersion"], SCALER["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    # All values of a trigger are texts.
    assert all(isinstance(value, str) for trigger in TRIGGERS for value in trigger["metadata"].values())


@pytest.mark.parametrize(
    "field", ["ignoreNullValues", "cooldownPeriod", "scaleTargetRef", "failureThreshold"]
)
def test_a_planted_error_is_found(field: str) -> None:
    text = FILE.read_text()
    assert f"{field}:" in text

    planted = yaml.safe_load(text.replace(f"{field}:", f"{field}s:"))

    assert [path.rpartition(".")[2] for path in unknown(planted)] == [f"{field}s"]


def test_its_behaviour_is_one_of_kubernetes() -> None:
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "x"},
        "spec": {
            "scaleTargetRef": SCALER["spec"]["scaleTargetRef"],
            "maxReplicas": SCALER["spec"]["maxReplicaCount"],
            "behavior": SCALER["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        },
    }
    kubernetes_validate.validate(scaler, "1.30", strict=True)


def test_it_scales_the_workers_whose_queue_it_asks_for() -> None:
    target = SCALER["spec"]["scaleTargetRef"]
    assert {name: WORKER[name] for name in ("apiVersion", "kind")} | {
        "name": WORKER["metadata"]["name"]
    } == target
    (container,) = WORKER["spec"]["template"]["spec"]["containers"]
    (queue,) = (one["value"] for one in container["env"] if one["name"] == "STREAMFLEET_QUEUE")
    (trigger,) = TRIGGERS
    series, asked = re.findall(r'(\w+)\{queue="([^"]+)"\}', trigger["metadata"]["query"])[0]
    assert asked == queue
    figures = QueueFigures(queue, 50, 20, 100, 0, 0, {}, {}, 0, 0, False, 1, 0, 0, None)
    page = page_of(Reading(Figures((figures,), {}, None, None, None), 0.0))
    assert (
        sum(
            page.get_sample_value(series, {"queue": queue, "state": one}) or 0
            for one in ("queued", "running")
        )
        == 70
    )


def test_nothing_is_taken_away_while_a_model_may_still_load() -> None:
    """Nor where nobody knows what waits."""
    (container,) = WORKER["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    load_s = probe["periodSeconds"] * probe["failureThreshold"]
    spec = SCALER["spec"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]

    assert spec["cooldownPeriod"] > load_s
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] > load_s
    assert TRIGGERS[0]["metadata"]["ignoreNullValues"] == "false"
    # The fallback is of this type of metric alone.
    assert TRIGGERS[0]["metricType"] == "AverageValue"
    assert spec["fallback"]["replicas"] >= spec["minReplicaCount"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_its_query_counts_each_request_once(tmp_path: Path) -> None:
    """Where two exporters tell the same, and where none tells anything."""
    query = TRIGGERS[0]["metadata"]["query"]
    depth = 'streamfleet_queue_depth{{queue="{}",state="{}",instance="{}"}}'
    told = [
        {"series": depth.format(queue, state, instance), "values": f"{value}x10"}
        for queue, state, value in (
            ("smollm2", "queued", 50),
            ("smollm2", "running", 20),
            ("other", "queued", 7),
        )
        for instance in ("a", "b")
    ]
    tests = [
        {
            "interval": "15s",
            "input_series": series,
            "promql_expr_test": [{"expr": query, "eval_time": "1m", "exp_samples": samples}],
        }
        for series, samples in ((told, [{"labels": "{}", "value": 70}]), (told[4:], []))
    ]
    file = tmp_path / "scaler.yml"
    file.write_text(yaml.safe_dump({"tests": tests}))
    check = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout + check.stderr
