"""Whether what the exporter needs is installed. Imports none of it."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("starlette", "uvicorn", "httptools", "prometheus_client", "structlog")


def missing() -> str | None:
    """What to do about the packages of the extra that are not there; None if all are."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if not absent:
        return None
    plural = "package" if len(absent) == 1 else "packages"
    return f"the exporter needs the Python {plural} {', '.join(absent)}: pip install 'streamfleet[exporter]'"
