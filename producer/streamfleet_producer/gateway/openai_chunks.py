"""Chunks of OpenAI's streams, as server-sent events. No HTTP here.

They are put together of parts that are made once for a stream: that is most of what a chunk costs.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

DONE = b"data: [DONE]\n\n"


class Chunks:
    """Makes the chunks of one answer.

    Args:
        id: of the answer.
        object: what its chunks are called.
        created: a Unix time in seconds.
        model: as the client calls it.
        revision: of the model; "" if it is not known.
        tells_usage: there will be a chunk with the usage.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 (theirs)
        object: str,  # noqa: A002
        *,
        created: int,
        model: str,
        revision: str,
        tells_usage: bool,
    ) -> None:
        head = {
            "id": id,
            "object": object,
            "created": created,
            "model": model,
            "system_fingerprint": revision or None,
        }
        self._head = f'data: {_json(head)[:-1]},"choices":['
        self._choice = self._head + '{"index":'
        # As theirs: null in all chunks but the last one.
        self._end = '}],"usage":null}\n\n' if tells_usage else "}]}\n\n"
        self._plain_end = ',"logprobs":null,"finish_reason":null' + self._end

    def text(self, index: int, text: str, logprobs: Any = None) -> bytes:
        """More text of a completion."""
        return self._said(index, '"text":' + encode_basestring(text), logprobs)

    def content(self, index: int, text: str, logprobs: Any = None) -> bytes:
        """More text of a chat."""
        return self._said(index, '"delta":{"content":' + encode_basestring(text) + "}", logprobs)

    def role(self, index: int, *, may_call: bool) -> bytes:
        """The first chunk of a chat's choice. If that may be nothing but calls, there is no content yet."""
        content = "null" if may_call else '""'
        said = f'"delta":{{"role":"assistant","content":{content},"refusal":null}}'
        return self._said(index, said, None)

    def call(self, index: int, place: int, call: dict[str, Any]) -> bytes:
        """A call of a tool, the whole of it; `place` counts those of the choice."""
        return self._said(index, f'"delta":{{"tool_calls":[{_json({"index": place, **call})}]}}', None)

    def finish(self, index: int, said: str, reason: str) -> bytes:
        """The last chunk of a choice; `said` is the field that has nothing more to say."""
        return f'{self._choice}{index},{said},"logprobs":null,"finish_reason":"{reason}"{self._end}'.encode()

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The tokens of the whole answer."""
        return f'{self._head}],"usage":{_json(usage)}}}\n\n'.encode()

    def _said(self, index: int, said: str, logprobs: Any) -> bytes:
        if logprobs is None:
            return f"{self._choice}{index},{said}{self._plain_end}".encode()
        told = _json(logprobs)
        return f'{self._choice}{index},{said},"logprobs":{told},"finish_reason":null{self._end}'.encode()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
