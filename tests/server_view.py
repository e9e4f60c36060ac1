"""What is really on the server, seen with a plain client."""

from __future__ import annotations

from typing import Any

from streamfleet_common.keys import LETTERS
from streamfleet_common.records import Record

T = "{q:q:0}"
RID = "00" + "ab" * 16
OTHER = "00" + "cd" * 16


def now_ms(raw: Any) -> int:
    """The server's clock."""
    seconds, micros = raw.time()
    return int(seconds) * 1000 + int(micros) // 1000


def fields_of(raw: Any, rid: str) -> list[str]:
    """The head of a record, split."""
    head: bytes = raw.get(f"{T}:r:{rid}").partition(b"\n")[0]
    return head.decode().split("|")


def record_of(raw: Any, rid: str = RID) -> Record:
    return Record.parse(raw.get(f"{T}:r:{rid}"))


def log_of(raw: Any, rid: str) -> list[tuple[str, bytes]]:
    return [(id_.decode(), fields[b"f"]) for id_, fields in raw.xrange(f"{T}:ev:{rid}")]


def events_of(raw: Any, rid: str = RID) -> list[str]:
    """The ids in a log."""
    return [id_ for id_, _ in log_of(raw, rid)]


def waiting_in(raw: Any, stream: str) -> list[str]:
    """The requests whose entries lie in a stream, whether given out or not."""
    return [fields[b"r"].decode() for _, fields in raw.xrange(f"{T}:s:{stream}")]


def pending_in(raw: Any, stream: str) -> list[dict[str, Any]]:
    """What is given out of a stream: entry, owner, idle time in ms and number of deliveries."""
    found = raw.xpending_range(f"{T}:s:{stream}", "w", "-", "+", 1000)
    return [
        {
            "eid": entry["message_id"].decode(),
            "owner": entry["consumer"].decode(),
            "idle_ms": entry["time_since_delivered"],
            "deliveries": entry["times_delivered"],
        }
        for entry in found
    ]


def dead_of(raw: Any) -> list[dict[str, bytes]]:
    """The dead letters."""
    return [{name.decode(): value for name, value in fields.items()} for _, fields in raw.xrange(f"{T}:dead")]


def consumers_of(raw: Any, stream: str) -> list[str]:
    return sorted(consumer["name"].decode() for consumer in raw.xinfo_consumers(f"{T}:s:{stream}", "w"))


def everything(raw: Any) -> dict[bytes, bytes | None]:
    """All there is, to see that a call changed nothing."""
    return {key: raw.dump(key) for key in raw.keys("*")}


def calls_of(raw: Any, command: str) -> int:
    """How often the server ran a command, scripts included."""
    return int(raw.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def assert_drained(raw: Any) -> None:
    """Nothing is left but results with a life."""
    assert raw.zcard(f"{T}:open") == 0
    assert not raw.exists(f"{T}:later")
    assert not raw.exists(f"{T}:tenants")
    for stream in LETTERS:
        assert raw.xlen(f"{T}:s:{stream}") == 0, stream
        assert raw.xpending(f"{T}:s:{stream}", "w")["pending"] == 0, stream
    for key in (*raw.keys(f"{T}:r:*"), *raw.keys(f"{T}:ev:*")):
        assert raw.pttl(key) > 0, key


class Channel:
    """A plain subscription, confirmed; `messages` reads what has come."""

    def __init__(self, raw: Any, rid: str, tenant: str = "default") -> None:
        self._pubsub = raw.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(f"{T}:c:{tenant}:{rid}")
        self._pubsub.get_message(timeout=60)  # the confirmation

    def messages(self) -> list[bytes]:
        # A publish goes out before the reply of the script that made it; a ping on this line comes behind it.
        self._pubsub.ping("end")
        found: list[bytes] = []
        while True:
            message = self._pubsub.get_message(timeout=60)
            assert message is not None, "the server does not answer"
            if message["type"] == "pong":
                return found
            found.append(message["data"])
