"""Numbers with Grafana's units, as a reader wants them."""

from __future__ import annotations

_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_COUNTS = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, ""))
_TAILS = {"reqps": "/s", "ops": "/s"}


def shown(value: float, unit: str) -> str:
    """A value in one of the units `s`, `bytes`, `percentunit`, `reqps`, `ops`, `short`, `none`."""
    if unit == "percentunit":
        return f"{_digits(100 * value)} %"
    if unit == "s":
        return _scaled(value, _TIMES) if value else "0 s"
    if unit == "bytes":
        return _scaled(value, _BYTES)
    return _scaled(value, _COUNTS).strip() + _TAILS.get(unit, "")


def _scaled(value: float, scale: tuple[tuple[float, str], ...]) -> str:
    for size, name in scale:
        if abs(value) >= size:
            return f"{_digits(value / size)} {name.strip()}".strip()
    size, name = scale[-1]
    return f"{_digits(value / size)} {name}".strip()


def _digits(value: float) -> str:
    """Three digits that say something, without zeros behind the point."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value else "0"
