"""That the comparison of libraries for guided output runs, and that our own column keeps or refuses."""

import json
import subprocess
import sys
from pathlib import Path

from tiny_model import tiny_model


def test_ours_keeps_a_form_or_refuses_it() -> None:
    arguments = ["--model", str(tiny_model()), "--only", "costs", "features", "--libraries", "ours", "--json"]
    command = [sys.executable, str(Path(__file__).parent / "guide.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", timeout=50, check=True)
    found = json.loads(done.stdout)
    assert all(form["mask us"] > 0 for form in found["costs"]["ours"]["forms"].values())
    verdicts = found["features"]["ours"]
    assert set(verdicts.values()) == {"kept", "refused"}
    assert {name for name, verdict in verdicts.items() if verdict == "refused"} == {
        "oneOf that overlap",
        "not",
        "uniqueItems",
        "contains",
        "propertyNames",
        "dependentRequired",
        "if, then",
        "format nobody knows",
        "x-guidance is only a word",
    }
