"""Calls of a handler: from a request to its one item, and to an answer."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic_core
from pydantic import ValidationError

from streamfleet_common.errors import GenerationFailed, InvalidRequest, ModelNotFound, Unsupported
from streamfleet_common.message import problems
from streamfleet_common.one_shot import CallRequest
from streamfleet_common.schemas import Request, Usage
from streamfleet_worker.engine.item import ItemSpec
from streamfleet_worker.handlers.call_input import CallInput
from streamfleet_worker.handlers.handler import Handler

OBJECT_FACTOR = 4
"""Bytes of an input that waits, for each byte of its JSON: the text, and the objects made of it."""


class CallJob:
    """One call, made ready."""

    n = 1
    usage = Usage()

    def __init__(self, item: ItemSpec, tokenize_s: float) -> None:
        self.items = (item,)
        self.tokenize_s = tokenize_s

    def answer(self, results: Sequence[Any]) -> Mapping[str, Any]:
        """The item's outputs: one, or the parts of it."""
        return {"outputs": tuple(results[0])}


class CallTask:
    """What can be asked for where a handler is served: calls of it."""

    counts: Mapping[str, int] = {}

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def prepare(self, request: Request, _scope: str = "") -> CallJob:
        """Check an input; callable from any thread.

        Raises:
            Unsupported: it is another kind of request.
            ModelNotFound: it is for another handler.
            InvalidRequest: its input is none of this handler's; `problems` lists why.
        """
        name = self._handler.name
        if not isinstance(request, CallRequest):
            raise Unsupported(
                f"this queue serves {self._handler}, which takes calls and nothing else: send a CallRequest",
                feature=request.kind,
            )
        if request.handler != name:
            raise ModelNotFound(f"this queue serves {self._handler}, not {request.handler!r}", known=[name])
        began = time.perf_counter()
        try:
            text = pydantic_core.to_json(request.input)
            value = CallInput(text, self._handler.signature.input)
        except ValidationError as error:
            faults = problems(error)
            raise InvalidRequest(
                f"{self._handler} takes no such input: {'; '.join(faults)}", problems=faults
            ) from None
        except pydantic_core.PydanticSerializationError as error:
            raise InvalidRequest(
                f"the input for {self._handler} cannot be written as JSON: {error}"
            ) from None
        except Exception:
            raise
        # A validator of the user's that calls sys.exit must not end the worker.
        except BaseException as error:
            kind = type(error).__name__
            raise GenerationFailed(f"a validator of {self._handler} raised {kind}") from error
        item = ItemSpec(value, digest=self._digest(request.input), bytes=OBJECT_FACTOR * len(text))
        return CallJob(item, time.perf_counter() - began)

    def _digest(self, given: Any) -> bytes | None:
        if not self._handler.deterministic:
            return None
        # Of what came, not of what was read: a type need not write all that it has read (a secret, say), and
        # two inputs that are told apart must never be taken for one.
        text = json.dumps(given, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()
