"""The examples of `docs/handlers.md`, as they stand there."""

from __future__ import annotations

import ast
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from served_handler import ServedHandler, told
from streamfleet_worker.handlers.loading import load

GUIDE = Path(__file__).parents[3] / "docs" / "handlers.md"


class Classifier:
    """As scikit-learn's: rows of probabilities in the order of `classes_`."""

    classes_ = np.array(["bad", "good"])

    def predict_proba(self, texts: list[str]) -> Any:
        return np.array([[0.25, 0.75] if "lovely" in text else [0.625, 0.375] for text in texts])


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module for each example that holds a handler."""
    joblib: Any = types.ModuleType("joblib")
    joblib.load = {"sentiment.joblib": Classifier()}.__getitem__
    monkeypatch.setitem(sys.modules, "joblib", joblib)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        compile(block, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = re.search(r'^@handler\("(\w+)"', block, re.MULTILINE)
        if found is not None:
            (tmp_path / f"guide_{found[1]}.py").write_text(block)
    return tmp_path


def test_the_first_example_tells_moods(guide: Path) -> None:
    served = ServedHandler(load("guide_sentiment:predict"))

    ends = served.ask({"text": "What a lovely day"}, {"text": "Rain"})

    assert [told(end) for end in ends] == [{"label": "good", "score": 0.75}, {"label": "bad", "score": 0.625}]
    served.close()


def test_the_torch_example_multiplies(guide: Path) -> None:
    weight = torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]])
    torch.save({"weight": weight, "bias": torch.tensor([0.5, 0.0])}, guide / "linear.pt")
    served = ServedHandler(load("guide_linear:linear"))

    ends = served.ask([1, 2, 3, 4], [0, 1, 0, 1])

    assert [told(end) for end in ends] == [[1.5, 4.0], [0.5, 2.0]]
    served.close()


def test_the_streaming_example_spells(guide: Path) -> None:
    served = ServedHandler(load("guide_spell:spell"))

    assert [end.outputs for end in served.ask("abc", "d")] == [("a", "b", "c"), ("d",)]
    served.close()
