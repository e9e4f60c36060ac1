"""Scripts that differ from the real ones in one place."""

from __future__ import annotations

import hashlib

from streamfleet_common.broker import Broker
from streamfleet_common.scripts import Script, ScriptName


def changed(name: ScriptName, *changes: tuple[str, str], script: Script | None = None) -> Script:
    """The script `name` (or `script`) with each `right` replaced by its `wrong`.

    Raises:
        LookupError: one of them is not there: the script has changed, and what is changed in it must follow.
    """
    text = (script or Script.load(name)).text
    for right, wrong in changes:
        if right not in text:
            # No AssertionError: a test that expects one must not take this for it.
            raise LookupError(f"{name} has no {right!r} any more")
        text = text.replace(right, wrong)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def change(broker: Broker, name: ScriptName, *changes: tuple[str, str]) -> None:
    """Let this broker use a changed script."""
    scripts = broker._calls._scripts
    scripts[name] = changed(name, *changes, script=scripts[name])
