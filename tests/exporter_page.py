"""An exporter in the test's own process, and what stands on pages of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from streamfleet_common.connections import Connections
from streamfleet_common.figures_reader import FiguresReader
from streamfleet_producer.exporter.app import application
from streamfleet_producer.exporter.reading import Readings

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A name without our prefix, and its labels in order."""


def series(name: str, **labels: str) -> Series:
    return name, tuple(sorted(labels.items()))


def samples_of(text: str) -> dict[Series, float]:
    """Every sample of a page, as Prometheus reads it; the times at which series began are left out."""
    return {
        series(sample.name.removeprefix("streamfleet_"), **sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


class Exporter:
    """`async with Exporter(url) as exporter`; `http` asks it."""

    def __init__(self, url: str, queues: Sequence[str] = (), *, timeout_s: float = 30.0) -> None:
        self.connections = Connections.open(url, max_connections=2)
        self.readings = Readings(FiguresReader(self.connections), queues, timeout_s=timeout_s)
        app = application(self.readings)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://exporter")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()
        await self.readings.close()
        await self.connections.close()

    async def page(self) -> str:
        answer = await self.http.get("/metrics")
        assert answer.status_code == 200
        return answer.text

    async def samples(self) -> dict[Series, float]:
        return samples_of(await self.page())
