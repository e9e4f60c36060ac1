"""How large an answer may become on the wire, told before any of it is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamfleet_common.codec import MAX_RESULT_BYTES
from streamfleet_common.errors import InvalidRequest

if TYPE_CHECKING:
    from streamfleet_worker.engine.prepared import Prepared

ID_BYTES = 5
LOGPROB_BYTES = 9
TEXT_BYTES = 4
"""Of one token, on average; the rest is for the server to refuse."""
TOP_BYTES = ID_BYTES + LOGPROB_BYTES + 1
"""Of one of the likeliest tokens."""


def check_result_size(prepared: Prepared) -> None:
    """Refuse what could fill more than a result, after hours of work and for nothing.

    Raises:
        InvalidRequest: so many tokens, with all that is to be told of each, do not fit.
    """
    logprobs = LOGPROB_BYTES if prepared.logprobs else 0
    token = ID_BYTES + TEXT_BYTES + logprobs + TOP_BYTES * prepared.top_logprobs
    size = prepared.n * (len(prepared.prefix.encode()) + prepared.max_tokens * token)
    if prepared.prompt_logprobs:
        scored = ID_BYTES + TEXT_BYTES + LOGPROB_BYTES + TOP_BYTES * prepared.top_logprobs
        size += len(prepared.prompt_token_ids) * scored
    if size > MAX_RESULT_BYTES:
        raise InvalidRequest(
            f"the answer may take {size} bytes, and a result holds {MAX_RESULT_BYTES}: ask for less of "
            "n, max_tokens, top_logprobs, prompt_logprobs or echo",
            bytes=size,
            limit=MAX_RESULT_BYTES,
        )
