"""That the sampler's benchmark runs and measures both sides; never how fast."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_each_case_is_measured_beside_transformers(tmp_path: Path) -> None:
    script, result = Path(__file__).with_name("sampling.py"), tmp_path / "result.json"
    arguments = ["--batch", "4", "--vocab", "500", "--rounds", "1", "--json", str(result)]
    run = subprocess.run(
        [sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, timeout=150, check=True
    )
    found = json.loads(result.read_text())
    assert found.keys() == {"peaked", "flat"}
    for cases in found.values():
        assert {"greedy", "temperature", "top_p 0.9", "greedy, top 5 logprobs"} <= cases.keys()
        for name, times in cases.items():
            assert name in run.stdout
            assert 0 < times["ours_ms"] <= times["ours_median_ms"]
            assert 0 < times["transformers_ms"] <= times["transformers_median_ms"]
