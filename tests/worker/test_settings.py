"""The settings as an operator meets them: documented, defaulted, and refused by their variable's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.settings import misspelled, read
from streamfleet_worker import process as program
from streamfleet_worker.engines import builder
from streamfleet_worker.settings import WorkerSettings

DEFAULTS: dict[str, Any] = {
    "redis_url": "redis://localhost:6379/0",
    "queue": "default",
    "durability": "fast",
    "engine": "auto",
    "handler": None,
    "model": "smollm2",
    "models_file": None,
    "device": "auto",
    "precision": "auto",
    "threads": 1,
    "preload": True,
    "max_batch_size": None,
    "max_batch_tokens": 16384,
    "max_delay_ms": None,
    "max_seq_len": 4096,
    "max_waiting_tokens": 16,
    "max_waiting_ms": 1000.0,
    "max_prefill_tokens": 2048,
    "prefill_chunk": 512,
    "exact": True,
    "cache_mib": None,
    "prefix_cache_mib": 256,
    "tokenization_cache_mib": 32,
    "answer_cache_mib": 0,
    "answer_cache_ttl_s": 3600.0,
    "cuda_graphs": False,
    "max_queue_depth": 1024,
    "max_queue_tokens": 0,
    "sub_lanes": 1,
    "lease_s": 15.0,
    "step_limit_s": 300.0,
    "dead_letter_payload": False,
    "drain_timeout_s": 30.0,
    "workers": 0,
    "max_crashes": 5,
    "http_host": "127.0.0.1",
    "http_port": None,
    "log_format": "console",
    "log_level": "info",
}
DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEFAULTS:
        monkeypatch.delenv(f"STREAMFLEET_{name.upper()}", raising=False)


def documented() -> dict[str, str]:
    rows = re.findall(r"^\| (`STREAMFLEET_[^|]+) \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE)
    found: dict[str, str] = {}
    for names, defaults in rows:
        found.update(
            zip(
                re.findall(r"STREAMFLEET_(\w+)", names),
                [default.strip(" `") for default in defaults.split(",")],
                strict=True,
            )
        )
    return found


def test_defaults() -> None:
    assert read(WorkerSettings).model_dump() == DEFAULTS


def test_defaults_are_those_of_the_documentation() -> None:
    found = documented()
    assert {name.upper() for name in DEFAULTS} <= set(found)
    for name, default in DEFAULTS.items():
        text = found[name.upper()]
        if isinstance(default, bool):
            assert text == str(default).lower(), name
        elif isinstance(default, int | float):
            assert float(text) == default, name
        else:
            assert text == ("none" if default is None else default), name


def test_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMFLEET_MAX_BATCH_SIZE", "32")
    monkeypatch.setenv("STREAMFLEET_HTTP_PORT", "0")
    settings = read(WorkerSettings)
    assert settings.max_batch_size == 32
    assert settings.http_port == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QUEUE", "two words"),
        ("QUEUE", ""),
        ("ENGINE", "vllm"),
        ("PRECISION", "int3"),
        ("THREADS", "0"),
        ("MAX_BATCH_SIZE", "0"),
        ("MAX_BATCH_SIZE", "eight"),
        ("MAX_BATCH_SIZE", "4097"),
        ("MAX_DELAY_MS", "-1"),
        ("MAX_DELAY_MS", "nan"),
        ("MAX_SEQ_LEN", "1"),
        ("MAX_WAITING_TOKENS", "0"),
        ("MAX_WAITING_MS", "nan"),
        ("MAX_PREFILL_TOKENS", "31"),
        ("PREFILL_CHUNK", "31"),
        ("EXACT", "maybe"),
        ("CACHE_MIB", "0"),
        ("PREFIX_CACHE_MIB", "-1"),
        ("CUDA_GRAPHS", "2"),
        ("MAX_QUEUE_DEPTH", "0"),
        ("MAX_QUEUE_TOKENS", "-1"),
        ("LEASE_S", "0.1"),
        ("LEASE_S", "inf"),
        ("STEP_LIMIT_S", "0"),
        ("STEP_LIMIT_S", "nan"),
        ("DEAD_LETTER_PAYLOAD", "maybe"),
        ("WORKERS", "-1"),
        ("MAX_CRASHES", "0"),
        ("DRAIN_TIMEOUT_S", "inf"),
        ("DRAIN_TIMEOUT_S", "nan"),
        ("HTTP_PORT", "65536"),
        ("LOG_FORMAT", "xml"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_wrong_value_ends_with_status_2_and_the_variables_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"STREAMFLEET_{name}", value)
    assert program.main() == 2
    said = capsys.readouterr().err
    assert f"STREAMFLEET_{name}: " in said
    assert said.count("\n") == 1


def test_every_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMFLEET_THREADS", "0")
    monkeypatch.setenv("STREAMFLEET_HTTP_PORT", "x")
    with pytest.raises(InvalidRequest) as caught:
        read(WorkerSettings)
    assert [fault.partition(":")[0] for fault in caught.value.problems] == [
        "STREAMFLEET_THREADS",
        "STREAMFLEET_HTTP_PORT",
    ]


def test_a_misspelled_variable_is_told_from_a_strange_one() -> None:
    variables = {
        "STREAMFLEET_MAX_BATCHSIZE": "a slip",
        "STREAMFLEET_MAX_BATCH_SIZE": "right",
        "STREAMFLEET_SERVICE_HOST": "what a cluster sets for a service of this name",
        "STREAMFLEET_PORT": "this too",
        "STREAMFLEET_CACHE": "read elsewhere",
        "MAX_BATCHSIZE": "not ours",
    }
    assert misspelled(WorkerSettings, variables) == {
        "STREAMFLEET_MAX_BATCHSIZE": "STREAMFLEET_MAX_BATCH_SIZE"
    }


def test_the_scripted_engine_keeps_to_the_settings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENGINE", "scripted"), ("MAX_BATCH_SIZE", "3"), ("MAX_SEQ_LEN", "50")):
        monkeypatch.setenv(f"STREAMFLEET_{name}", value)
    info = builder(read(WorkerSettings))().info
    assert (info.max_batch_size, info.max_seq_len) == (3, 50)
