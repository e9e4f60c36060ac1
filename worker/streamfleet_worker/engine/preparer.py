"""Requests to prepared requests: checked against this model, with their prompts in tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from streamfleet_common.errors import InvalidRequest, ModelNotFound, TooLong
from streamfleet_worker.engine.sequence import Prepared

if TYPE_CHECKING:
    from streamfleet_common.schemas import Request
    from streamfleet_worker.engine.base import EngineInfo
    from streamfleet_worker.engine.tokenizer import Tokenizer


class Preparer:
    """The door of the generation engine; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._info = info

    def prepare(self, request: Request) -> Prepared:
        """Check a request and turn its prompt into tokens.

        Raises:
            ModelNotFound: it names another model.
            TooLong: prompt and answer do not fit.
            Unsupported: it has messages, and the model no chat template.
            InvalidRequest: an empty prompt, a token id out of range, messages the template refuses.
        """
        if request.model is not None and request.model != self._info.model:
            raise ModelNotFound(
                f"this worker serves {self._info.model!r}, not {request.model!r}",
                known=[self._info.model],
            )
        if request.messages is not None:
            ids = self._tokenizer.render(request.messages)
        elif request.prompt is not None:
            ids = self._tokenizer.encode(request.prompt)
        else:
            ids = list(request.prompt_token_ids or ())
        if not ids:
            raise InvalidRequest("the prompt has no tokens: there is nothing to continue")
        self._check_ids("prompt_token_ids", ids)
        self._check_ids("stop_token_ids", request.stop_token_ids)
        if len(ids) + request.max_tokens > self._info.max_seq_len:
            raise TooLong(
                prompt_tokens=len(ids),
                max_tokens=request.max_tokens,
                limit=self._info.max_seq_len,
            )
        return Prepared(
            prompt_token_ids=tuple(ids),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop=tuple(request.stop),
            include_stop=request.include_stop,
            stop_token_ids=frozenset(request.stop_token_ids),
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        limit = self._info.vocab_size
        faults = [
            f"{name}.{place}: token id {token_id} is not below the vocabulary size of {limit}"
            for place, token_id in enumerate(ids)
            if not 0 <= token_id < limit
        ]
        if faults:
            raise InvalidRequest(faults[0], problems=faults[:10], limit=limit)
