"""A file of records, read line by line into columns of numbers."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.report.records import (
    MAX_LINE_BYTES,
    Head,
    Outcome,
    RequestLine,
    SampleLine,
    decode,
)

MAX_REQUESTS = 1_000_000
MAX_SAMPLES = 1_000_000
MAX_ALL_GAPS = 8_000_000
MAX_KINDS = 8
UNKNOWN = -1.0
"""In a column of times: nobody has told."""


def _floats() -> array[float]:
    return array("d")


@dataclass
class Series:
    """The requests of one kind in one run, after the warm-up; columns in the order of the file.

    Latencies are of the requests that ended well: how long a refusal took says nothing about an answer.
    """

    kind: str
    submitted_ms: array[float] = field(default_factory=_floats)
    """Of all requests, as the three that follow."""
    ended_ms: array[float] = field(default_factory=_floats)
    first_ms: array[float] = field(default_factory=_floats)
    completion_tokens: array[float] = field(default_factory=_floats)
    is_done: bytearray = field(default_factory=bytearray)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    queue_ms: array[float] = field(default_factory=_floats)
    ttft_ms: array[float] = field(default_factory=_floats)
    gaps_ms: array[float] = field(default_factory=_floats)
    e2e_ms: array[float] = field(default_factory=_floats)
    sent_late_ms: float = 0.0
    """The latest that one was sent after its time."""

    def add(self, line: RequestLine) -> None:
        first = line.first_token_ms
        self.submitted_ms.append(line.submitted_ms)
        self.ended_ms.append(line.ended_ms)
        self.first_ms.append(UNKNOWN if first is None else first)
        self.completion_tokens.append(line.completion_tokens)
        self.is_done.append(line.outcome == "done")
        self.outcomes[line.outcome] += 1
        self.prompt_tokens += line.prompt_tokens
        if line.error:
            # Codes are few; a file that was made up might hold a million.
            known = line.error in self.errors or len(self.errors) < 32
            self.errors[line.error if known else "others"] += 1
        if line.sent_ms is not None:
            self.sent_late_ms = max(self.sent_late_ms, line.sent_ms - line.submitted_ms)
        if line.outcome != "done":
            return
        if line.batch_size is not None:
            self.batch_sizes[line.batch_size] += 1
        self.e2e_ms.append(line.ended_ms - line.submitted_ms)
        if line.started_ms is not None:
            self.queue_ms.append(line.started_ms - line.submitted_ms)
        if first is not None:
            self.ttft_ms.append(first - line.submitted_ms)
        self.gaps_ms.extend(line.gaps_ms)

    def __len__(self) -> int:
        return len(self.submitted_ms)


@dataclass
class Run:
    """One file."""

    path: Path
    head: Head
    series: dict[str, Series] = field(default_factory=dict)
    """By kind, in the order in which the kinds appear."""
    warmup: int = 0
    """Requests that are left out since they came before the warm-up was over."""
    sample_at_ms: array[float] = field(default_factory=_floats)
    queued: array[float] = field(default_factory=_floats)
    """As `running`, `rows` and `max_rows` of each sample; `UNKNOWN` where it does not tell."""
    running: array[float] = field(default_factory=_floats)
    rows: array[float] = field(default_factory=_floats)
    max_rows: array[float] = field(default_factory=_floats)

    @property
    def requests(self) -> int:
        return sum(map(len, self.series.values()))

    def add(self, line: RequestLine | SampleLine) -> None:
        """Take one line.

        Raises:
            InvalidRequest: it is one too many.
        """
        if isinstance(line, SampleLine):
            if len(self.sample_at_ms) >= MAX_SAMPLES:
                raise InvalidRequest(f"it is sample {MAX_SAMPLES + 1:,}: sample less often")
            self.sample_at_ms.append(line.at_ms)
            for name in ("queued", "running", "rows", "max_rows"):
                value = getattr(line, name)
                getattr(self, name).append(UNKNOWN if value is None else value)
            return
        if line.submitted_ms < self.head.warmup_ms:
            self.warmup += 1
            return
        if self.requests >= MAX_REQUESTS:
            raise InvalidRequest(f"it is request {MAX_REQUESTS + 1:,}: record a shorter run")
        if line.kind not in self.series and len(self.series) >= MAX_KINDS:
            raise InvalidRequest(f"it is of kind {MAX_KINDS + 1}: tell at most {MAX_KINDS} kinds apart")
        if sum(len(one.gaps_ms) for one in self.series.values()) + len(line.gaps_ms) > MAX_ALL_GAPS:
            raise InvalidRequest(
                f"it holds gap {MAX_ALL_GAPS + 1:,}: record a shorter run, or leave gaps out"
            )
        self.series.setdefault(line.kind, Series(line.kind)).add(line)


def read(path: Path) -> Run:
    """Read a file.

    Raises:
        InvalidRequest: it cannot be read, or a line is wrong; `file` and `line` tell which.
    """
    run: Run | None = None
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                try:
                    run = _take(run, path, data)
                except InvalidRequest as error:
                    raise _bad(path, number, error, is_cut=not data.endswith(b"\n")) from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", file=str(path), line=0) from None
    if run is None:
        raise InvalidRequest(
            f"{path} is empty: write records with `streamfleet load --records {path}`", file=str(path), line=0
        )
    return run


def _take(run: Run | None, path: Path, data: bytes) -> Run:
    if len(data) > MAX_LINE_BYTES:
        raise InvalidRequest(f"it is over {MAX_LINE_BYTES:,} bytes")
    if not data.strip():
        if run is None:
            raise InvalidRequest("it is empty, and the first line has to be the head")
        return run
    line = decode(data)
    if isinstance(line, Head):
        if run is not None:
            raise InvalidRequest("it is a second head: give each run a file of its own")
        return Run(path, line)
    if run is None:
        raise InvalidRequest('the first line has to be the head, with "type": "head" and what was run')
    run.add(line)
    return run


def _bad(path: Path, number: int, error: InvalidRequest, *, is_cut: bool) -> InvalidRequest:
    what = "it was cut off while it was written: remove it" if is_cut and "JSON" in error.message else None
    return InvalidRequest(
        f"{path}, line {number}: {what or error.message}"
        + ("" if what else " (mend or remove the line; docs/report.md has the format)"),
        problems=error.problems,
        file=str(path),
        line=number,
    )
