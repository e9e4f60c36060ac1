"""The bar of a long run: where somebody looks, and nowhere else."""

from __future__ import annotations

import pytest

from streamfleet_producer.cli.progress import FEW, Progress


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take stderr for a terminal."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")


def run(total: int | None, done: int, *, to_terminal: bool = False) -> None:
    with Progress(total, to_terminal=to_terminal) as progress:
        for _ in range(done):
            progress.advance(1)


def test_a_long_run_tells_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    run(100, 50)
    out, err = capsys.readouterr()
    assert out == ""
    assert "50/100" in err


def test_nobody_knows_the_end_of_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    run(None, FEW + 1)
    assert f"{FEW + 1}/?" in capsys.readouterr().err


@pytest.mark.parametrize("total", [None, FEW])
def test_a_few_need_no_bar(capsys: pytest.CaptureFixture[str], total: int | None) -> None:
    run(total, FEW)
    assert capsys.readouterr().err == ""


def test_it_stays_out_of_the_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    run(100, 50, to_terminal=True)
    assert capsys.readouterr().err == ""


def test_it_is_not_for_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    run(100, 50)
    assert capsys.readouterr().err == ""


def test_no_bar_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    run(100, 50)
    assert capsys.readouterr().err.endswith("\x1b[1A\x1b[2K")  # up, and the line is cleared
