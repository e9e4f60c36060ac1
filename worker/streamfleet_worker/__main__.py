"""`python -m streamfleet_worker`. Needs the extra `worker` (prometheus-client, structlog)."""

from __future__ import annotations

import sys


def main() -> int:
    """Run one worker; the exit status is that of `process.main`, or 1 if a package is missing."""
    try:
        import prometheus_client  # noqa: F401, PLC0415 (only whether it is there)
        import structlog  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"error: a worker needs the Python package {error.name!r}: pip install 'streamfleet[worker]'\n"
        )
        return 1
    from streamfleet_worker import process  # noqa: PLC0415 (needs the packages looked for above)

    return process.main()


if __name__ == "__main__":
    sys.exit(main())
