"""Streams of the fleet told as OpenAI's: events in, chunks out. No HTTP here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from streamfleet_common.schemas import Choice, Delta, End, Prefill
from streamfleet_producer.gateway.openai_answers import FINISHED, echoed, tool_call, usage
from streamfleet_producer.gateway.openai_chat_request import ChatWish
from streamfleet_producer.gateway.openai_chunks import DONE, Chunks
from streamfleet_producer.gateway.openai_completion_request import CompletionWish
from streamfleet_producer.gateway.openai_logprobs import CompletionLogprobs, Names, chat_logprobs, joined
from streamfleet_producer.gateway.tool_calls import Call, Content, ToolCallParser


class CompletionTold:
    """A completion, prompt by prompt and choice by choice."""

    def __init__(self, wish: CompletionWish, chunks: Chunks, names: Names, *, tells_usage: bool) -> None:
        self._wish = wish
        self._chunks = chunks
        self._names = names
        self._tells_usage = tells_usage
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prefills: dict[int, Prefill] = {}
        self._held: defaultdict[int, list[Delta]] = defaultdict(list)
        """Deltas of each prompt that came before its tokens."""

    def take(self, place: int, event: Delta | Prefill) -> bytes:
        """What an event of the prompt in this place has to say; may be nothing."""
        if isinstance(event, Prefill):
            self._prefills[place] = event
            return self._release(place)
        if self._wish.echoes and place not in self._prefills:
            self._held[place].append(event)
            return b""
        return self._delta(place, event)

    def close(self, ends: Sequence[End]) -> bytes:
        """The last chunks, once all prompts have ended."""
        said = []
        for place, end in enumerate(ends):
            if end.prefill is not None:
                self._prefills.setdefault(place, end.prefill)
            said.append(self._release(place))
            for choice in end.choices:
                reason = FINISHED[choice.finish_reason]
                said.append(self._chunks.finish(self._index(place, choice), '"text":""', reason))
        if self._tells_usage:
            said.append(self._chunks.usage(usage(ends)))
        return b"".join(said) + DONE

    def _index(self, place: int, said: Delta | Choice) -> int:
        return place * self._wish.n + said.index

    def _release(self, place: int) -> bytes:
        return b"".join(self._delta(place, delta) for delta in self._held.pop(place, ()))

    def _delta(self, place: int, delta: Delta) -> bytes:
        index, text = self._index(place, delta), delta.text
        if self._wish.logprobs is None:
            return self._chunks.text(index, text) if text else b""
        parts: list[dict[str, Any]] = []
        told = self._logprobs.get(index)
        if told is None:
            told = self._logprobs[index] = CompletionLogprobs(self._names)
            if self._wish.echoes:
                prompt, parts = echoed(self._wish, place, self._prefills.get(place), told)
                text = prompt + text
        parts.append(told.add(delta.token_ids, delta.texts, delta.logprobs, delta.top_logprobs))
        return self._chunks.text(index, text, joined(parts))


class ChatTold:
    """A chat, choice by choice."""

    def __init__(self, id: str, wish: ChatWish, chunks: Chunks, names: Names, *, tells_usage: bool) -> None:  # noqa: A002
        self._id = id
        self._wish = wish
        self._chunks = chunks
        self._names = names
        self._tells_usage = tells_usage
        self._begun: set[int] = set()
        self._parsers: defaultdict[int, ToolCallParser] = defaultdict(lambda: ToolCallParser(wish.tools))
        self._calls: defaultdict[int, int] = defaultdict(int)

    def take(self, delta: Delta) -> bytes:
        """What a delta has to say; may be nothing."""
        index, text, logprobs = delta.index, delta.text, None
        opening = b"" if index in self._begun else self._open(index)
        if self._wish.logprobs:
            told = chat_logprobs(
                delta.token_ids, delta.texts, delta.logprobs, delta.top_logprobs, self._names
            )
            logprobs = {"content": told, "refusal": None}
        if not self._wish.tools:
            said = self._chunks.content(index, text, logprobs) if text or logprobs else b""
            return opening + said
        said = self._parts(index, self._parsers[index].feed(text))
        if logprobs is not None:
            # The text of these tokens may be held back, their numbers are not.
            said = self._chunks.content(index, "", logprobs) + said
        return opening + said

    def close(self, end: End) -> bytes:
        """The last chunks."""
        said = []
        for choice in end.choices:
            index = choice.index
            if index not in self._begun:
                said.append(self._open(index))
            if index in self._parsers:
                said.append(self._parts(index, self._parsers[index].close()))
            reason = "tool_calls" if self._calls[index] else FINISHED[choice.finish_reason]
            said.append(self._chunks.finish(index, '"delta":{}', reason))
        if self._tells_usage:
            said.append(self._chunks.usage(usage([end])))
        return b"".join(said) + DONE

    def _open(self, index: int) -> bytes:
        self._begun.add(index)
        return self._chunks.role(index, may_call=bool(self._wish.tools))

    def _parts(self, index: int, parts: Sequence[Content | Call]) -> bytes:
        said = []
        for part in parts:
            place = self._calls[index]
            if isinstance(part, Content):
                said.append(self._chunks.content(index, part.text))
            elif not (place and self._wish.one_call):
                self._calls[index] += 1
                said.append(self._chunks.call(index, place, tool_call(self._id, index, place, part)))
        return b"".join(said)
