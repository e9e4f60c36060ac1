"""What is said of settings that cannot be read."""

from __future__ import annotations

import pytest

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.settings import read
from streamfleet_producer.exporter.settings import ExporterSettings
from streamfleet_producer.gateway.settings import GatewaySettings


@pytest.mark.parametrize("value", ["chat", "chat,embed", "[chat]", "["])
def test_a_list_that_is_no_json_is_told_by_its_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("STREAMFLEET_EXPORTER_QUEUES", value)
    with pytest.raises(InvalidRequest, match="STREAMFLEET_EXPORTER_QUEUES: JSON is wanted"):
        read(ExporterSettings)


def test_so_is_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMFLEET_TOKENIZERS", "chat=tokenizer.json")
    with pytest.raises(InvalidRequest, match="STREAMFLEET_TOKENIZERS: JSON is wanted"):
        read(GatewaySettings)
