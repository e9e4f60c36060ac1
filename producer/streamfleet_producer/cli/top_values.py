"""Numbers in at most five characters, as a narrow table has room for them."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

NOTHING = "-"
"""Where there is no value: it is not zero."""


def count(value: float | None) -> str:
    """As 9999, 12.3k, 999k, 1.2M."""
    if value is None:
        return NOTHING
    value = round(value)
    if value < 10_000:
        return str(value)
    for unit in "kMGTP":
        value = value / 1000
        if value < 99.95:
            return f"{value:.1f}{unit}"
        if value < 999.5:
            return f"{value:.0f}{unit}"
    return "many"


def rate(value: float | None) -> str:
    """As 0, 0.25, 12.3, 1234."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    if value < 0.01:
        return "<0.01"
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else count(value)


def duration(seconds: float | None) -> str:
    """As .25ms, 2.5ms, 250ms, 2.50s, 25.0s, 2m05, 3h05, 4d."""
    if seconds is None:
        return NOTHING
    if seconds < 0.9995:
        return _milliseconds(seconds * 1000)
    if seconds < 59.95:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}"
    return f"{min(whole // 86_400, 9999)}d"


def _milliseconds(ms: float) -> str:
    if ms < 0.995:
        return f"{ms:.2f}ms"[1:] if ms >= 0.005 else "0ms"
    return f"{ms:.1f}ms" if ms < 9.95 else f"{ms:.0f}ms"


def percent(share: float | None) -> str:
    """As 0%, 87%, 100%."""
    return NOTHING if share is None else f"{share:.0%}"


def fitted(text: str, width: int, *, is_left: bool = True) -> str:
    """The text in exactly `width` cells of a terminal; of a long one the middle is left out.

    Names that share a beginning differ at their ends.
    """
    have = cell_len(text)
    if have <= width:
        gap = " " * (width - have)
        return text + gap if is_left else gap + text
    if width < 4:
        return set_cell_size(text, width)
    tail_width = (width - 1) // 2
    tail = ""
    for char in reversed(text):
        if cell_len(char + tail) > tail_width:
            break
        tail = char + tail
    return set_cell_size(text, width - 1 - cell_len(tail)) + "…" + tail
