"""`python -m streamfleet_worker`. Needs the extra `worker` (prometheus-client, structlog)."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from streamfleet_worker.settings import WRONG_SETTINGS, chosen


def main() -> int:
    """Run one worker, or a supervisor of several; the exit status is theirs, or 1 if a package is missing."""
    for package in ("prometheus_client", "structlog"):
        if find_spec(package) is None:
            sys.stderr.write(
                f"error: a worker needs the Python package {package!r}: pip install 'streamfleet[worker]'\n"
            )
            return 1
    settings = chosen()
    if settings is None:
        return WRONG_SETTINGS
    if settings.workers:
        # Neither imports what the other needs, which may be large or missing.
        from streamfleet_worker import supervisor_process  # noqa: PLC0415

        return supervisor_process.main(settings)
    from streamfleet_worker import process  # noqa: PLC0415

    return process.main(settings)


if __name__ == "__main__":
    sys.exit(main())
