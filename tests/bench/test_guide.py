"""That our column of the comparison of libraries for guided output keeps each form, or refuses it."""

from pathlib import Path

import pytest

from tiny_model import tiny_model


def test_ours_keeps_a_form_or_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import guide  # noqa: PLC0415

    bench = guide.Bench("ours", str(tiny_model()))
    costs = guide.answer(bench, "costs", "", 0)["forms"]
    assert all(form["mask us"] > 0 for form in costs.values())
    verdicts = guide.answer(bench, "features", "", 0)
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
