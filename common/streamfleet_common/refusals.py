"""What a server's refusal of a user was about, in words that go on from "Redis at …".

Of a refusal by an ACL that is the command, and whether it was that itself, a key or a channel. Servers from
7.2 on name keys in some of their answers: those are never handed on.
"""

from __future__ import annotations

import re

NO_LOGIN = "wants a user and a password, and the URL has none: redis://NAME:PASSWORD@HOST"
WRONG_LOGIN = (
    "refuses the name or the password in the URL: check both, and that this user is on there "
    "(`streamfleet acl ROLE` makes one)"
)
_COMMAND = re.compile(r"run the '([A-Za-z0-9_.|-]{1,64})' command")
_PIPED = re.compile(r"Command # \d+ \(([A-Za-z]{1,64})\b.*caused error: ", re.DOTALL)
"""As the library says of which command of a pipeline an answer is."""
_KIND = re.compile(
    r"permissions to access .*\b(key|channel)s?\b|script can't access .*?\b(key|channel)s?\b", re.DOTALL
)


def by_acl(answer: str) -> str:
    """What an ACL refused, going by the server's answer."""
    in_script = ", in a script" if "script" in answer else ""
    kind = _KIND.search(answer)
    if kind is not None:
        piped = _PIPED.match(answer)
        of = f" of {piped[1].upper()}" if piped is not None else ""
        what = kind[1] or kind[2]
        place = "queue and tenant" if what == "channel" else "queue"
        must = f"its ACL must be of a role that may this, for this {place}"
        return f"refuses this user a {what}{of}{in_script}: {must}"
    command = _COMMAND.search(answer)
    what = f"the command {command[1].replace('|', ' ').upper()}" if command is not None else "a command"
    return f"refuses this user {what}{in_script}: its ACL must grant it (`streamfleet acl ROLE` makes one)"
