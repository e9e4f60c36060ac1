"""The header of W3C Trace Context, as its standard wants it read."""

from __future__ import annotations

import pytest

from streamfleet_common.trace_context import TraceContext, trace_of

# The example of the standard itself.
SAID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_standards_example_is_read_and_written() -> None:
    context = TraceContext.parse(SAID)
    assert context == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, 1)
    assert str(context) == SAID
    assert trace_of(SAID) == {"trace_id": "0af7651916cd43dd8448eb211c80319c"}


@pytest.mark.parametrize(
    "said",
    [
        None,
        "",
        SAID.upper(),
        SAID + "-00",
        SAID.replace("00-", "ff-", 1),
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "-" * 55,
        "0" * 55,
    ],
)
def test_what_is_none_is_no_trace_at_all(said: str | None) -> None:
    assert TraceContext.parse(said) is None
    assert trace_of(said) == {}


def test_a_later_version_is_read_as_this_one() -> None:
    assert TraceContext.parse("01" + SAID[2:]) == TraceContext.parse(SAID)
