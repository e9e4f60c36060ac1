"""How much an engine may take, from what the machine and its control group say."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine import memory
from streamfleet_worker.engine.memory import cache_tokens, free_bytes, peak_bytes

CPU = torch.device("cpu")
GIB = 1 << 30


def machine(
    root: Path, *, available: int | None = None, limit: str | None = None, taken: int = 0, files: int = 0
) -> Path:
    """A system's files; bytes."""
    if available is not None:
        (root / "proc").mkdir()
        lines = [f"MemTotal: {64 * GIB >> 10} kB", f"MemAvailable:   {available >> 10} kB", "Buffers: 1 kB"]
        (root / "proc/meminfo").write_text("\n".join(lines))
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{taken}\n")
        stat = f"anon {taken - files}\ninactive_file {files}\nactive_file 7\n"
        (root / "sys/fs/cgroup/memory.stat").write_text(stat)
    return root


def test_the_least_of_machine_and_control_group_is_free(tmp_path: Path) -> None:
    root = machine(tmp_path, available=8 * GIB, limit=str(4 * GIB), taken=3 * GIB)
    assert free_bytes(CPU, root) == GIB


def test_files_that_were_read_are_no_memory_taken(tmp_path: Path) -> None:
    # A model's weights, of which the group has a copy in the page cache.
    assert free_bytes(CPU, machine(tmp_path, limit=str(8 * GIB), taken=7 * GIB, files=5 * GIB)) == 6 * GIB


def test_a_control_group_without_a_limit_does_not_count(tmp_path: Path) -> None:
    assert free_bytes(CPU, machine(tmp_path, available=8 * GIB, limit="max", taken=GIB)) == 8 * GIB


def test_a_group_that_has_taken_more_than_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert free_bytes(CPU, machine(tmp_path, limit=str(GIB), taken=2 * GIB)) == 0


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert free_bytes(CPU, machine(tmp_path)) is None


def test_the_cache_takes_what_all_rows_can_need_and_no_more() -> None:
    # Rows are whole multiples of 64 tokens.
    assert cache_tokens(1000, 4, 100, CPU, 100 * GIB) == 4 * 128
    assert cache_tokens(1000, 4, 128, CPU, 100 * GIB) == 4 * 128


def test_the_cache_takes_no_more_than_it_may(caplog: pytest.LogCaptureFixture) -> None:
    # A token costs twice as much, since a row may be wider than what it holds.
    with caplog.at_level(logging.WARNING):
        assert cache_tokens(1000, 8, 4096, CPU, 1000 * 2 * 10_000) == 10_000 // 64 * 64
    assert not caplog.messages


def test_a_cache_too_small_for_the_longest_request_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert cache_tokens(1000, 8, 4096, CPU, 2_000_000) == 960
    assert "960 tokens: no request may be longer, though 4096 are allowed" in caplog.text


def test_a_cache_for_nobody_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelLoadFailed, match="STREAMFLEET_CACHE_MIB"):
        cache_tokens(1 << 20, 8, 4096, CPU, 64 << 20)


def test_by_default_it_takes_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 4 * 64_000 * 1000)
    assert cache_tokens(1000, 1000, 4096, CPU, None) == 64_000
    monkeypatch.setattr(memory, "free_bytes", lambda _: None)
    assert cache_tokens(1000, 2, 4096, CPU, None) == 8192


def test_the_peak_is_at_least_what_is_held() -> None:
    before = peak_bytes(CPU)
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_bytes(CPU) >= max(before, int(held.numel()))
