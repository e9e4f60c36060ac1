"""The numbers of a run, against hand computations and two libraries."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import numpy as np
import pytest

from run_files import request, samples, streamed, write
from streamfleet_producer.report.figures import (
    CUTS,
    Figures,
    percentile,
    rate_curves,
    sample_curve,
    slice_ms,
)
from streamfleet_producer.report.reading import read
from streamfleet_producer.report.scale import Scale, duration, number, percent, short, unit_of


@pytest.mark.parametrize(
    ("share", "wanted"), [(0, 10), (0.5, 25), (0.9, 37), (0.95, 38.5), (0.99, 39.7), (1, 40)]
)
def test_percentiles_lie_between_neighbours_in_proportion(share: float, wanted: float) -> None:
    assert percentile([10, 20, 30, 40], share) == pytest.approx(wanted)


def test_of_one_value_every_percentile_is_it_and_of_none_there_is_none() -> None:
    assert {percentile([7.0], share) for _, share in CUTS} == {7.0}
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize("count", [2, 3, 10, 99, 100, 101, 1000])
def test_percentiles_are_those_of_numpy_and_of_statistics(count: int) -> None:
    draw = random.Random(count)
    values = sorted(draw.lognormvariate(3, 1) for _ in range(count))
    hundredths = statistics.quantiles(values, n=100, method="inclusive")

    for share in (50, 90, 95, 99):
        found = percentile(values, share / 100)
        assert found == pytest.approx(np.percentile(values, share), rel=1e-12)
        assert found == pytest.approx(hundredths[share - 1], rel=1e-12)


def test_the_figures_of_a_run_are_those_found_by_hand(tmp_path: Path) -> None:
    (series,) = read(write(tmp_path / "r.jsonl", streamed(10))).series.values()

    figures = Figures.of(series)

    # The last one is sent at 9 s and takes 1 s.
    assert (figures.requests, figures.done, figures.seconds) == (10, 10, 10.0)
    assert figures.requests_per_s == pytest.approx(1.0)
    assert figures.tokens_per_s == pytest.approx(3.0)
    # 100, 200 … 1000 ms; 1 … 10 ms; 10 … 100 ms; half of the gaps 5 ms, half 7 ms.
    assert figures.latencies["e2e"].cuts == pytest.approx(
        {"p50": 550, "p90": 910, "p95": 955, "p99": 991, "max": 1000}
    )
    assert figures.latencies["e2e"].mean == pytest.approx(550)
    assert figures.latencies["queue"].cut(0.5) == pytest.approx(5.5)
    assert figures.latencies["ttft"].cut(0.9) == pytest.approx(91)
    assert figures.latencies["itl"].cuts == pytest.approx({"p50": 6, "p90": 7, "p95": 7, "p99": 7, "max": 7})


def test_what_did_not_end_well_is_counted_and_in_no_latency(tmp_path: Path) -> None:
    lines = [
        request(0, 100),
        request(10, 5, outcome="refused", error="queue_full"),
        request(20, 60_000, outcome="expired", error="deadline_exceeded"),
    ]
    (series,) = read(write(tmp_path / "r.jsonl", lines)).series.values()

    figures = Figures.of(series)

    assert figures.failed_share == pytest.approx(2 / 3)
    assert list(figures.latencies) == ["e2e"]
    assert figures.latencies["e2e"].cut(1.0) == 100
    # What expired a minute later made no answer slower.
    assert figures.requests_per_s == pytest.approx(10)
    assert series.errors == {"queue_full": 1, "deadline_exceeded": 1}


def test_the_warm_up_is_left_out(tmp_path: Path) -> None:
    run = read(write(tmp_path / "r.jsonl", streamed(10), warmup_ms=3000))

    assert run.warmup == 3
    assert run.requests == 7
    assert Figures.of(run.series["generate"]).latencies["queue"].cuts["p50"] == pytest.approx(7)


def test_rates_over_time_add_up_to_what_was_answered(tmp_path: Path) -> None:
    # 120 s, an answer of 30 tokens each second that streams for 10 s: slices of 2 s.
    lines = [request(1000.0 * n, 10_000, first_token_ms=1000.0 * n, completion_tokens=30) for n in range(111)]
    (series,) = read(write(tmp_path / "r.jsonl", lines)).series.values()

    requests, tokens = rate_curves(Figures.of(series))

    assert slice_ms(120_000) == 2000
    assert requests.values[0] == 0
    assert requests.values[20] == pytest.approx(1.0)
    # Ten of them at a time, three tokens a second each.
    assert tokens.values[20] == pytest.approx(30)
    assert sum(value or 0 for value in tokens.values) * 2 == pytest.approx(111 * 30)


def test_tokens_of_an_answer_that_is_not_streamed_count_at_its_end(tmp_path: Path) -> None:
    lines = [request(0, 60_000, completion_tokens=30), request(0, 30_500, completion_tokens=10)]
    (series,) = read(write(tmp_path / "r.jsonl", lines)).series.values()

    _, tokens = rate_curves(Figures.of(series))

    # Slices of a second, of which the last one has the end of the longer one.
    assert [value for value in tokens.values if value] == [10.0, 30.0]
    assert tokens.at_s[tokens.values.index(10.0)] == pytest.approx(30.5)


def test_samples_become_means_and_shares_and_what_is_not_told_is_left_out(tmp_path: Path) -> None:
    lines = [
        {"type": "sample", "at_ms": 0, "queued": 4, "rows": 2, "max_rows": 8},
        {"type": "sample", "at_ms": 500, "queued": 6, "rows": 4, "max_rows": 8},
        {"type": "sample", "at_ms": 59_000, "running": 3, "rows": 3, "max_rows": 0},
    ]
    run = read(write(tmp_path / "r.jsonl", [request(0, 1), *lines]))

    assert sample_curve(run, run.queued).values == [5.0]
    assert sample_curve(run, run.running).values == [3.0]
    assert sample_curve(run, run.rows, run.max_rows).values == [pytest.approx(0.375)]
    assert not sample_curve(run, run.max_rows, run.max_rows) or run.max_rows[0] == 8


def test_as_many_samples_as_a_run_has_make_no_more_points_than_a_plot_has(tmp_path: Path) -> None:
    run = read(write(tmp_path / "r.jsonl", [request(0, 1), *samples(5000)]))

    assert 50 <= len(sample_curve(run, run.queued).values) <= 70


def test_scales_have_few_round_ticks() -> None:
    assert Scale.linear(97, 5).ticks == (0, 20, 40, 60, 80, 100)
    assert Scale.linear(0.0).ticks[-1] == 1
    log = Scale.fitting([3, 40, 7000])
    assert log.is_log
    assert log.ticks == pytest.approx((10, 100, 1000, 10_000))
    assert not Scale.fitting([30, 40, 70]).is_log
    assert log.place(log.low) == 0
    assert log.place(math.sqrt(log.low * log.high)) == pytest.approx(0.5)
    assert log.place(0) == 0  # a logarithm has no place for it
    assert unit_of(Scale.linear(4000)).name == "s"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (duration(0), "0 ms"),
        (duration(0.0421), "42.1 µs"),
        (duration(0.5), "0.5 ms"),
        (duration(999.4), "999 ms"),
        (duration(1234), "1.23 s"),
        (duration(600_000), "10 min"),
        (number(1234.5), "1,234"),
        (short(1500), "1.5k"),
        (short(2_000_000), "2M"),
        (percent(0.25), "25 %"),
        (percent(0.0001), "< 0.1 %"),
        (percent(0.99995), "> 99.9 %"),
        (percent(1), "100 %"),
    ],
)
def test_numbers_are_written_for_people(text: str, wanted: str) -> None:
    assert text == wanted
