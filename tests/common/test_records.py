"""Records, written by hand as the scripts write them."""

from __future__ import annotations

import pytest

from streamfleet_common.errors import Undecodable
from streamfleet_common.frames import Frame
from streamfleet_common.records import LETTERS, STATES, Record

META = "1754000000001|n|s|600000|3.250.f|129|acme|0123abcd"
QUEUED = f"Q1754000600001|0|n1754000000001-0||0|0|0|0|{META}"
RUNNING = f"R1754000600001|3|N1754000000001-0|host:1|1754000000005|2|1|0|{META}"
FRAME = "4-1,1754000000001,1754000000005,1754000000009,2 body|with\nanything"
ENDED = f"E%s|1|0|acme|0123abcd\n{FRAME}"


def test_queued() -> None:
    assert Record.parse(QUEUED.encode()) == Record(
        state="queued",
        epoch=0,
        tenant="acme",
        accepted_at_ms=1754000000001,
        started_at_ms=0,
        attempts=0,
        crashes=0,
        solo_losses=0,
        deadline_at_ms=1754000600001,
        owner="",
        digest="0123abcd",
        end=None,
        lane="normal",
        place="n1754000000001-0",
        is_stream=True,
    )


def test_running() -> None:
    assert Record.parse(RUNNING.encode()) == Record(
        state="running",
        epoch=3,
        tenant="acme",
        accepted_at_ms=1754000000001,
        started_at_ms=1754000000005,
        attempts=2,
        crashes=1,
        solo_losses=0,
        deadline_at_ms=1754000600001,
        owner="host:1",
        digest="0123abcd",
        end=None,
        lane="normal",
        place="N1754000000001-0",
        is_stream=True,
    )


@pytest.mark.parametrize(
    ("letter", "state"),
    [("D", "done"), ("F", "failed"), ("C", "cancelled"), ("X", "expired"), ("P", "dead")],
)
def test_ended(letter: str, state: str) -> None:
    record = Record.parse((ENDED % letter).encode())
    assert (record.state, record.epoch, record.tenant, record.attempts) == (state, 4, "acme", 2)
    assert (record.accepted_at_ms, record.started_at_ms) == (1754000000001, 1754000000005)
    assert (record.deadline_at_ms, record.owner) == (0, "")
    assert (record.crashes, record.solo_losses, record.digest) == (1, 0, "0123abcd")
    assert record.end == Frame(4, 1, b"body|with\nanything", (1754000000001, 1754000000005, 1754000000009, 2))


def test_waiting_for_the_next_try() -> None:
    record = Record.parse(f"Q1754000600001|4|||1754000000005|2|3|1|{META}\npay|load\n".encode() + b"\xff")
    assert (record.state, record.epoch, record.owner, record.attempts) == ("queued", 4, "", 2)
    assert (record.crashes, record.solo_losses, record.started_at_ms) == (3, 1, 1754000000005)
    assert (record.tenant, record.digest, record.end) == ("acme", "0123abcd", None)


def test_an_end_whose_body_is_no_text() -> None:
    head = (ENDED % "D").partition("\n")[0].encode()
    record = Record.parse(head + b"\n4-1,1,2,3,4 \xff\x00\n\n|")
    assert record.end is not None
    assert record.end.body == b"\xff\x00\n\n|"


@pytest.mark.parametrize("tenant", ["-", "a.b_c-9", "t" * 64])
def test_tenants(tenant: str) -> None:
    assert Record.parse(RUNNING.replace("acme", tenant).encode()).tenant == tenant


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"Q",
        b"E",
        b"ED",
        b"\xff\xfe",
        b"done",
        QUEUED.replace("Q1754000600001", "Q").encode(),
        QUEUED.replace("Q1754000600001", "Qx").encode(),
        QUEUED.replace("Q1", "Z1").encode(),
        QUEUED.replace("|acme", "").encode(),
        QUEUED.replace("acme", "ac|me").encode(),
        RUNNING.replace("|3|", "|three|").encode(),
        (ENDED % "D").replace("|acme", "").encode(),
        (ENDED % "Z").encode(),
        (ENDED % "").encode(),
        (ENDED % "D").partition("\n")[0].encode() + b"\nno frame",
    ],
)
def test_no_record(data: bytes) -> None:
    with pytest.raises(Undecodable):
        Record.parse(data)


def test_letters() -> None:
    assert len(LETTERS) == len(STATES) == 7
    assert {STATES[letter] for letter in "QRDFCXP"} == set(LETTERS)
