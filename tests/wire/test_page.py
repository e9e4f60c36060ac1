"""docs/protocol.md against what is sent: the text of the script, and the calls on the page made again."""

from __future__ import annotations

import re

import pytest
import redis

from hand_worker import HandWorker
from streamfleet_common import codec
from streamfleet_common.schemas import End, Envelope, GenerateRequest
from streamfleet_common.scripts import Script
from wire.page import blocks, calls, pattern, shown

SCRIPTS = {"SUBMIT": Script.load("submit"), "CANCEL": Script.load("cancel")}


def test_the_page_has_the_script_byte_for_byte() -> None:
    (text,) = blocks("lua")
    assert text == SCRIPTS["SUBMIT"].text, "copy lua/submit.lua to docs/protocol.md as it is now"


async def test_the_calls_on_the_page_have_the_replies_on_the_page(redis_url: str) -> None:
    async with HandWorker(redis_url, "docs") as worker:
        await worker.announce(max_queue_depth=1)
    (rule,) = blocks("acl")
    with redis.Redis.from_url(redis_url, retry_on_timeout=False) as admin:
        for script in SCRIPTS.values():
            admin.script_load(script.text)
        admin.execute_command(
            "ACL", "SETUSER", "page", "reset", "on", ">secret", *rule.replace("\\", "").split()
        )
    made = 0
    # By the user whom the page describes, who may do no more than it needs.
    with redis.Redis.from_url(redis_url, username="page", password="secret") as client:
        for call in calls(**{name: script.sha for name, script in SCRIPTS.items()}):
            try:
                reply: object = client.execute_command(*call.words)
            except redis.ResponseError as error:
                # The library takes the first word away.
                reply = redis.ResponseError(f"ERR {error}")
            assert re.fullmatch(pattern(call.reply), shown(reply)), (call, shown(reply))
            made += 1
        channel = "{q:docs:0}:c:other:00" + "a" * 32
        for words in (
            ["SUBSCRIBE", channel],
            ["KEYS", "*"],
            ["DEL", "{q:docs:0}:open"],
            ["GET", "{q:other:0}:r:a"],
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
    assert made == 13


def test_the_bytes_on_the_page_are_those_of_the_codec() -> None:
    words = [call.words for call in calls()]
    submitted = [call for call in words if call[:2] == [b"EVALSHA", b"SUBMIT"] and call[8] != b"\x80"]
    (payload,) = {call[8] for call in submitted}
    envelope = Envelope(rid="00" + "a" * 32, request=GenerateRequest(prompt="Hi"))
    assert payload == codec.encode(envelope)
    assert codec.decode_envelope(payload) == envelope
    (end,) = [call[5] for call in words if call[:2] == [b"EVALSHA", b"CANCEL"]]
    assert codec.decode_event(end) == End(state="cancelled")
