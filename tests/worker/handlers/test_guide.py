"""The examples of `docs/handlers.md`, as they stand there."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from served_handler import ServedHandler, told
from streamfleet_worker.handlers.loading import load

GUIDE = Path(__file__).parents[3] / "docs" / "handlers.md"


class Classifier:
    """As scikit-learn's: rows of probabilities in the order of `classes_`, here by words that were seen."""

    def fit(self, texts: list[str], labels: list[str]) -> Classifier:
        self.classes_ = np.array(sorted(set(labels)))
        self._seen = list(zip((set(text.split()) for text in texts), labels, strict=True))
        return self

    def predict_proba(self, texts: list[str]) -> Any:
        counts = [
            [
                1 + sum(len(seen & set(text.split())) for seen, of in self._seen if of == label)
                for label in self.classes_
            ]
            for text in texts
        ]
        return np.array([np.array(row) / sum(row) for row in counts])


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module for each example that holds a handler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    if importlib.util.find_spec("sklearn") is None:  # it is nothing of ours
        for name, made in (
            ("sklearn", {}),
            ("sklearn.feature_extraction", {}),
            ("sklearn.feature_extraction.text", {"CountVectorizer": object}),
            ("sklearn.linear_model", {"LogisticRegression": object}),
            ("sklearn.pipeline", {"make_pipeline": lambda *_: Classifier()}),
        ):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
            vars(sys.modules[name]).update(made)
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        compile(block, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = re.search(r'^@handler\("(\w+)"', block, re.MULTILINE)
        if found is not None:
            (tmp_path / f"guide_{found[1]}.py").write_text(block)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("guide_")]:
        del sys.modules[name]


def test_the_first_example_tells_moods(guide: Path) -> None:
    served = ServedHandler(load("guide_sentiment:predict"))

    ends = served.ask({"text": "What a lovely day"}, {"text": "just awful"})

    assert [told(end)["label"] for end in ends] == ["good", "bad"]
    assert all(0.5 < told(end)["score"] < 1 for end in ends)
    served.close()


def test_the_torch_example_multiplies(guide: Path) -> None:
    served = ServedHandler(load("guide_linear:linear"))

    # The inputs that show a linear map for what it is: its bias, and the columns of its weights.
    ends = served.ask([0, 0, 0, 0], *np.eye(4).tolist(), [1, 2, 3, 4])

    bias, *rows, last = (np.array(told(end)) for end in ends)
    columns = [row - bias for row in rows]
    assert all(np.abs(column).max() > 1e-3 for column in columns)
    wanted = bias + sum(factor * column for factor, column in enumerate(columns, 1))
    np.testing.assert_allclose(last, wanted, rtol=1e-5)
    served.close()


def test_the_streaming_example_spells(guide: Path) -> None:
    served = ServedHandler(load("guide_spell:spell"))

    assert [end.outputs for end in served.ask("abc", "d")] == [("a", "b", "c"), ("d",)]
    served.close()
