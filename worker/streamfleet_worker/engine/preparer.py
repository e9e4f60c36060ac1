"""Requests to prepared requests: checked against this model, with their prompts in tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from streamfleet_common.errors import InvalidRequest, ModelNotFound, TooLong
from streamfleet_worker.engine.prepared import Prepared

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
        self._check_ids("sampling.logit_bias", dict(request.sampling.logit_bias))
        kept = self._truncated(ids, request)
        return Prepared(
            prompt_token_ids=tuple(kept),
            max_tokens=self._max_tokens(len(kept), request),
            sampling=request.sampling,
            n=request.n,
            cut_tokens=len(ids) - len(kept),
            min_tokens=request.min_tokens,
            stop=tuple(request.stop),
            include_stop=request.include_stop,
            stop_token_ids=frozenset(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            bad_words=tuple(dict.fromkeys(self._runs(request.sampling.bad_words))),
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            echo=request.echo,
            skip_special_tokens=request.skip_special_tokens,
        )

    @staticmethod
    def _truncated(ids: list[int], request: Request) -> list[int]:
        limit = request.truncate
        if limit is None or len(ids) <= limit:
            return ids
        return ids[-limit:] if request.truncate_side == "left" else ids[:limit]

    def _max_tokens(self, prompt_tokens: int, request: Request) -> int:
        limit = self._info.max_seq_len
        least = 1 if request.max_tokens == "fit" else request.max_tokens
        if prompt_tokens + max(least, request.min_tokens) > limit:
            raise TooLong(prompt_tokens=prompt_tokens, max_tokens=max(least, request.min_tokens), limit=limit)
        return limit - prompt_tokens if request.max_tokens == "fit" else request.max_tokens

    def _runs(self, words: Collection[str]) -> Iterator[tuple[int, ...]]:
        """Each word's tokens as they follow a space, and as they follow anything else."""
        for word in words:
            for spelling in (word, f" {word.lstrip()}"):
                yield tuple(self._tokenizer.encode_piece(spelling))

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        limit = self._info.vocab_size
        faults = [
            f"{name}.{place}: token id {token_id} is not below the vocabulary size of {limit}"
            for place, token_id in enumerate(ids)
            if not 0 <= token_id < limit
        ]
        if faults:
            raise InvalidRequest(faults[0], problems=faults[:10], limit=limit)
