"""A bulk job outlives whoever runs it, whoever answers it, and the server between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.bulk_kills import VICTIMS, BulkKills
from faults.figures import keep

_LONG = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("lines", "kills", "appendfsync"),
    [
        pytest.param(300, 1, "always", id="quick"),
        pytest.param(10_000, 6, "always", id="long", marks=_LONG),
        pytest.param(10_000, 6, "everysec", id="everysec", marks=_LONG),
    ],
)
async def test_each_line_is_answered_once_whoever_is_killed(
    lines: int, kills: int, appendfsync: str, tmp_path: Path
) -> None:
    judged = await BulkKills(lines, kills, appendfsync=appendfsync, folder=tmp_path).run()
    assert judged.faults(lines) == []
    assert judged.killed == dict.fromkeys(VICTIMS, kills)
    if kills > 1:
        found = (
            f"each answered once, {judged.batch.runs} runs, starts {dict(sorted(judged.attempts.items()))}"
        )
        keep(
            f"F90 bulk job, {appendfsync}",
            f"{lines} lines, {kills} kills each of RQ worker, job, fleet worker and Redis",
            f"{found}, {judged.took_s:.0f} s",
            "each once; starts at most 1 + owners lost",
        )
