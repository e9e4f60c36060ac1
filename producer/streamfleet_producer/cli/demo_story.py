"""What the demo tells at its end: one paragraph in plain words, from the worker's own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamfleet_producer.cli.exchange import Exchange

_NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


def story(exchanges: Sequence[Exchange], metrics: Mapping[str, float]) -> str:
    """The paragraph. `metrics` are the worker's, by sample name (see `Workers.metrics`)."""
    answered = [exchange for exchange in exchanges if exchange.state == "done"]
    count = len(exchanges)
    asked = f"{_NUMBERS[count] if count < len(_NUMBERS) else count} question{'s' if count != 1 else ''}"
    if not answered:
        return f"{asked} went through a Redis stream to one worker, and none was answered."
    passes = round(metrics.get("streamfleet_batch_size_count", 0))
    rows = round(metrics.get("streamfleet_batch_size_sum", 0))
    tokens = sum(exchange.tokens for exchange in answered)
    firsts = sorted(exchange.first_s for exchange in answered)
    total_s = max(exchange.total_s for exchange in answered)
    how = "answered it" if count == 1 else "answered them together"
    parts = [f"{asked} went through a Redis stream to one worker, which {how}:"]
    if passes:
        runs = f"{passes} run{'' if passes == 1 else 's'}"
        parts.append(
            f"{runs} of its model made {rows} tokens, in batches of {rows / passes:.1f} requests on "
            f"average{_larger(metrics)}; one at a time it would have taken {rows} runs."
        )
    parts.append(
        f"The first tokens were here {_span(firsts)} s after the question, and {tokens} tokens in "
        f"{total_s:.1f} s make {tokens / total_s:.0f} a second, each published the moment it was made."
    )
    missing = count - len(answered)
    if missing:
        parts.append(f"{missing} of the answers failed.")
    return " ".join(parts)


def _larger(metrics: Mapping[str, float]) -> str:
    """How many batches were of the largest size class that the histogram tells apart."""
    total = metrics["streamfleet_batch_size_count"]
    bounds = sorted(
        (float(name.partition("{")[2].rstrip("}")), count)
        for name, count in metrics.items()
        if name.startswith("streamfleet_batch_size_bucket{")
    )
    larger = [(total - count, bound) for bound, count in bounds if count < total]
    return f", {larger[-1][0]:.0f} of them larger than {larger[-1][1]:.0f}" if larger else ""


def _span(seconds: Sequence[float]) -> str:
    least, most = f"{seconds[0]:.2f}", f"{seconds[-1]:.2f}"
    return least if least == most else f"{least} to {most}"
