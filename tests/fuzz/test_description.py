"""The gateway against its own description: schemathesis makes requests of it and judges the answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gated_engine import GatedEngine
from gateway_process import Gateway
from hired import Hired

LIMIT_S = 300.0
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)


def judged(url: str, folder: Path, seconds: int) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    options = ("--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--request-timeout", "30")
    return subprocess.run(
        [
            *command,
            *options,
            "--max-time",
            str(seconds),
            "--checks",
            ",".join(CHECKS),
            "-H",
            "X-Request-Timeout:5",
        ],
        cwd=folder,  # where it keeps what it found
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_answers_are_as_they_are_described(redis_url: str, tmp_path: Path) -> None:
    hired = await Hired(redis_url, "w", GatedEngine()).start()
    try:
        async with Gateway(redis_url, files_dir=tmp_path / "files", max_file_bytes=100_000) as gateway:
            found = await asyncio.to_thread(judged, gateway.url, tmp_path, 60)
            async with httpx.AsyncClient() as client:
                metrics = (await client.get(f"{gateway.url}/metrics")).text
    finally:
        await hired.dismiss()
    assert found.returncode == 0, found.stdout[-4000:]
    assert " passed" in found.stdout
    # Judged by the gateway's own count as well: requests have come, and none of them was answered with a 500.
    assert metrics.count("streamfleet_gateway_requests_total{") > 20
    assert 'status="500"' not in metrics
