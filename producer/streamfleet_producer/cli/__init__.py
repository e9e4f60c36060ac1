"""The `streamfleet` command: a file per subcommand. Needs the extra `cli` (typer, rich)."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)  # so early that no command was there to end


def _run() -> None:
    try:
        import rich  # noqa: F401, PLC0415 - only whether it is there
        import typer  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"error: the streamfleet command needs the Python package {error.name!r}: "
            "pip install 'streamfleet[cli]'\n"
        )
        sys.exit(1)
    from streamfleet_producer.cli.app import app  # noqa: PLC0415 - needs the packages looked for above

    app()
