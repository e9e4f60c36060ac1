"""docs/protocol.md against what is sent: the text of the script, and the calls on the page made again."""

from __future__ import annotations

from streamfleet_common.scripts import Script
from wire.page import blocks


def test_the_page_has_the_script_byte_for_byte() -> None:
    (text,) = blocks("lua")
    assert text == Script.load("submit").text
