"""Files of records of a benchmark, for `streamfleet report`: one for each system or side."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from streamfleet_producer.report.machine import machine, versions
from streamfleet_producer.report.records import Head, decode, encode


def add_option(parser: Any) -> None:
    """`--records FOLDER`, the same words for every benchmark."""
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FOLDER",
        help="leave what `streamfleet report` draws of the last round here, a file for each system",
    )


def write(
    folder: Path,
    name: str,
    lines: Iterable[bytes | dict[str, Any]],
    settings: Mapping[str, object],
    *,
    label: str | None = None,
    loop: Literal["closed", ""] = "closed",
) -> Path:
    """Write one file, the head first; each line is checked as it will be read.

    Raises:
        InvalidRequest: a line is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = Head(
        label=label or name,
        command=shlex.join(["python", "tests/bench/" + Path(sys.argv[0]).name, *sys.argv[1:]])[:2000],
        began_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        loop=loop,
        machine=machine(),
        versions=versions(),
        settings={key: str(value) for key, value in settings.items()},
    )
    path = folder / f"{name}.jsonl"
    with path.open("wb") as file:
        file.write(encode(head))
        for line in lines:
            data = line if isinstance(line, bytes) else json.dumps(line).encode()
            file.write(encode(decode(data)))
    return path
