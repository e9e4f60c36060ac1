"""What the demo tells at its end: one paragraph in plain words, from the worker's own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamfleet_producer.cli.exchange import Exchange

_NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


def story(exchanges: Sequence[Exchange], metrics: Mapping[str, float]) -> str:
    """The paragraph. `metrics` are the worker's, by sample name (see `WorkerProcess.metrics`)."""
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
    parts = [f"{asked} went through a Redis stream to one worker, which answered them together:"]
    if passes:
        parts.append(
            f"{passes} runs of its model made {rows} tokens, in batches of {rows / passes:.1f} requests on "
            f"average{_largest(metrics)}; one by one it would have taken {rows} runs."
        )
    parts.append(
        f"The first tokens were here {_span(firsts)} s after the question, and {tokens} tokens in "
        f"{total_s:.1f} s make {tokens / total_s:.0f} a second, each published the moment it was made."
    )
    missing = count - len(answered)
    if missing:
        parts.append(f"{missing} of the answers failed.")
    return " ".join(parts)


def _largest(metrics: Mapping[str, float]) -> str:
    """What the histogram knows of the largest batch: the bucket it fell in."""
    total = metrics.get("streamfleet_batch_size_count", 0)
    bounds = sorted(
        (float(name.partition("{")[2].rstrip("}")), value)
        for name, value in metrics.items()
        if name.startswith("streamfleet_batch_size_bucket{")
    )
    below = 0.0
    for bound, value in bounds:
        if value >= total:
            return f" ({_range(below, bound)} at most)" if bound != float("inf") else ""
        below = bound
    return ""


def _range(below: float, bound: float) -> str:
    lowest, highest = int(below) + 1, int(bound)
    return str(highest) if lowest >= highest else f"{lowest} to {highest}"


def _span(seconds: Sequence[float]) -> str:
    least, most = f"{seconds[0]:.2f}", f"{seconds[-1]:.2f}"
    return least if least == most else f"{least} to {most}"
