"""Requests to prepared requests: checked against this model, with their prompts in tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import TYPE_CHECKING, cast

from streamfleet_common.errors import InvalidRequest, ModelNotFound, TooLong, Unsupported
from streamfleet_worker.engine.prepared import Prepared
from streamfleet_worker.engine.result_size import check_result_size

if TYPE_CHECKING:
    from streamfleet_common import schemas
    from streamfleet_worker.engine.base import EngineInfo
    from streamfleet_worker.engine.guide import Guide
    from streamfleet_worker.engine.tokenizer import Tokenizer

MAX_FAULTS = 10
"""More are not listed, in an answer to a request that may be hostile."""


class Preparer:
    """The door of the generation engine; safe to use from several threads.

    Args:
        tokenizer: the model's.
        info: what the engine serves.
        compile_guide: makes a form of a scope ready; None where none can be had.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        compile_guide: Callable[[schemas.Guide, str], Guide] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._compile_guide = compile_guide

    def prepare(self, request: schemas.GenerateRequest, scope: str = "") -> Prepared:
        """Check a request and turn its prompt into tokens.

        Raises:
            ModelNotFound: it names another model.
            TooLong: prompt and answer do not fit.
            Unsupported: it has messages, and the model no chat template, or one without tools; or a guide,
                and there is no library for it.
            InvalidRequest: an empty prompt, a token id out of range, a bad word without tokens, messages
                the template refuses, more to tell than a result holds.
        """
        if request.model is not None and request.model != self._info.model:
            raise ModelNotFound(
                f"this worker serves {self._info.model!r}, not {request.model!r}",
                known=[self._info.model],
            )
        ids = self._prompt(request)
        bad_words = {word: self._tokenizer.spellings(word) for word in request.sampling.bad_words}
        faults = list(islice(self._faults(request, ids, bad_words), MAX_FAULTS))
        if faults:
            raise InvalidRequest(faults[0], problems=faults, limit=self._info.vocab_size)
        kept = self._truncated(ids, request)
        prepared = Prepared(
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
            bad_words=tuple(sorted({run for runs in bad_words.values() for run in runs})),
            guide=self._guide(request.guide, scope),
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            prefix=self._prefix(kept, request),
            skip_special_tokens=request.skip_special_tokens,
        )
        check_result_size(prepared)
        return prepared

    def _prompt(self, request: schemas.GenerateRequest) -> list[int]:
        if request.messages is not None:
            ids = self._tokenizer.render(request.messages, request.tools)
        elif request.prompt is not None:
            ids = self._tokenizer.encode(request.prompt)
            if ids == self._tokenizer.encode(""):
                ids = []
        else:
            ids = list(request.prompt_token_ids or ())
        if not ids:
            raise InvalidRequest("the prompt has no tokens: there is nothing to continue")
        return ids

    def _faults(
        self, request: schemas.GenerateRequest, ids: list[int], bad_words: dict[str, set[tuple[int, ...]]]
    ) -> Iterator[str]:
        # A map has become pairs by now, and pairs may name a token twice.
        bias = cast("tuple[tuple[int, float], ...]", request.sampling.logit_bias)
        biased = [token_id for token_id, _ in bias]
        yield from self._out_of_range("prompt_token_ids", ids)
        yield from self._out_of_range("stop_token_ids", request.stop_token_ids)
        yield from self._out_of_range("sampling.logit_bias", biased)
        seen = set()
        for place, token_id in enumerate(biased):
            if token_id in seen:
                yield f"sampling.logit_bias.{place}: token id {token_id} has a number already"
            seen.add(token_id)
        for place, word in enumerate(request.sampling.bad_words):
            if word.isspace():
                yield f"sampling.bad_words.{place}: nothing but spaces, which would forbid all words"
            elif not bad_words[word]:
                yield f"sampling.bad_words.{place}: this model has no tokens for it"

    def _out_of_range(self, name: str, ids: Collection[int]) -> Iterator[str]:
        limit = self._info.vocab_size
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < limit:
                yield f"{name}.{place}: token id {token_id} is not below the vocabulary size of {limit}"

    def _truncated(self, ids: list[int], request: schemas.GenerateRequest) -> list[int]:
        """At most `truncate` tokens of a prompt.

        Cut on the left, a prompt keeps the tokens that only say that a text begins, as long as another
        one has room beside them: models need them. Of a chat nothing else of the template is kept: a cut on
        the left takes the oldest turns first, a cut on the right the opening of the answer.
        """
        limit = request.truncate
        if limit is None or len(ids) <= limit:
            return ids
        if request.truncate_side == "right":
            return ids[:limit]
        opening = self._tokenizer.opening(ids)
        if opening >= limit:
            opening = 0
        return ids[:opening] + ids[len(ids) - limit + opening :]

    def _max_tokens(self, prompt_tokens: int, request: schemas.GenerateRequest) -> int:
        limit = self._info.max_seq_len
        wanted = max(1, request.min_tokens) if request.max_tokens == "fit" else request.max_tokens
        if prompt_tokens + wanted > limit:
            raise TooLong(prompt_tokens=prompt_tokens, max_tokens=wanted, limit=limit)
        return limit - prompt_tokens if request.max_tokens == "fit" else request.max_tokens

    def _guide(self, guide: schemas.Guide | None, scope: str) -> Guide | None:
        if guide is None:
            return None
        if self._compile_guide is None:
            raise Unsupported(
                "this worker cannot guide an answer: install its extra `guided` "
                "(pip install 'streamfleet[guided]')",
                feature="guide",
            )
        return self._compile_guide(guide, scope)

    def _prefix(self, ids: list[int], request: schemas.GenerateRequest) -> str:
        if not request.echo:
            return ""
        # Without a character that the prompt leaves unfinished: the answer may finish it.
        decoder = self._tokenizer.decoder(skip_special=request.skip_special_tokens)
        return "".join(map(decoder.push, ids))
