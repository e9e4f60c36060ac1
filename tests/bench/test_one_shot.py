"""That `one_shot.py` runs, and says what it promises. Never how fast: machines differ, and are shared."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from array import array
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def found(script: str, *arguments: str, limit_s: float = 150) -> Any:
    command = [sys.executable, str(HERE / script), *arguments, "--json"]
    return json.loads(subprocess.check_output(command, encoding="utf-8", timeout=limit_s))


@pytest.mark.slow
def test_calls_are_measured_by_handler_and_requests_in_flight() -> None:
    load = ("--in-flight", "1", "8", "--seconds", "0.2", "--rounds", "1")

    call = found("one_shot.py", "--part", "call", "--only", "streamfleet", *load)["call"]

    assert call["summary"].keys() == {"noop", "sleep"}
    for handler, loads in call["summary"].items():
        assert loads.keys() == {"1", "8"}
        for row in (rows["streamfleet"] for rows in loads.values()):
            assert 0 < row["p50_ms"] <= row["p99_ms"]
            assert row["cpu_us"].keys() == {"producer", "worker", "redis"}
        # With one in flight, each takes what its batch takes.
        assert handler == "noop" or 0 < loads["1"]["streamfleet"]["requests_per_s"] < 1 / 0.005


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_side_of_ours_gives_the_vectors_of_each_text_alone() -> None:
    sides = ("alone", "naive", "ours", "exact", "fleet", "fleet-whole")
    few = ("--texts", "16", "--rounds", "2", "--batch", "4")

    embed = found("one_shot.py", "--part", "embed", "--only", *sides, *few, limit_s=290)["embed"]

    assert embed["sides"].keys() == {*sides}
    for name, figures in embed["sides"].items():
        assert figures["least_cosine"] == pytest.approx(1, abs=1e-5), name
        assert figures["texts_per_s"] > 0
    assert embed["sides"]["fleet"]["cpu_s"].keys() == {"client", "worker", "redis"}
    assert embed["sides"]["naive"]["ratio"]["cpu"]["median"] > 0


def test_wrong_vectors_count_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from one_shot_side import References, Setup  # noqa: PLC0415

    right = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
    file = tmp_path / "references"
    file.write_bytes(array("f", chain.from_iterable(right)).tobytes())
    setup = Setup("", "", "float32", 1, 1, [["a"], ["b"], ["c"]], [], str(file))
    references = References(setup)

    assert references.least_cosine([[1.2, 1.6]], 1, 1) == pytest.approx(1)
    for wrong in ([1.0, 0.0], [0.8, 0.6], [math.nan, 1.0], [0.6, 0.7]):
        with pytest.raises(ValueError, match="wrong vectors"):
            references.least_cosine([wrong], 1, 1)


@pytest.mark.slow
def test_a_profile_of_calls_names_our_functions() -> None:
    seen = found("hotspots.py", "--handler", "--batch", "16", "--seconds", "2", "--in-flight", "32")

    for side in ("producer", "worker"):
        assert any(name.startswith(f"streamfleet_{side}") for name in seen[side]["package"])
