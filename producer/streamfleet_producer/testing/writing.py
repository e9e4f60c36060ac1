"""One attempt at an answer to a generate request: tokens as they are written, and the end made of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamfleet_common.message import Message
from streamfleet_common.schemas import Choice, Delta, End, FinishReason, GenerateRequest, Prefill, Usage
from streamfleet_producer.testing.script import texts_of


@dataclass(slots=True)
class _Line:
    """What one choice has so far."""

    deltas: list[Delta] = field(default_factory=list)
    count: int = 0


class Writing:
    """Writes the tokens of one attempt, to all choices unless a step says which."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._lines = [_Line() for _ in range(request.n)]
        self._prefill: Prefill | None = None

    @property
    def is_full(self) -> bool:
        """Every choice has as many tokens as the request allows."""
        return all(line.count >= self._limit for line in self._lines)

    def take(self, step: object) -> list[Message]:
        """The events of a step: a text is one token of each choice; a `Delta` or a `Prefill` is itself.

        Raises:
            ValueError: it is nothing that a text is made of.
        """
        if isinstance(step, Prefill):
            self._prefill = step
            return [step]
        if isinstance(step, Delta):
            if step.index >= len(self._lines):
                raise ValueError(
                    f"a Delta of choice {step.index}, and the request asks for {self._request.n}"
                )
            return self._add(step)
        if isinstance(step, str):
            return [
                event for index in range(len(self._lines)) for event in self._add(self._token(index, step))
            ]
        raise ValueError(f"a text is made of strings, not {type(step).__name__}")

    def end(self, reason: FinishReason) -> End:
        """The end of it; `reason` is that of every choice that has not met its limit."""
        choices = tuple(self._choice(index, reason) for index in range(len(self._lines)))
        words = sum(len(text.split()) for text in texts_of(self._request))
        usage = Usage(prompt_tokens=max(1, words), completion_tokens=sum(line.count for line in self._lines))
        return End(state="done", choices=choices, usage=usage, prefill=self._prefill, seed=self._seed)

    @property
    def _seed(self) -> int:
        return self._request.sampling.seed or 0

    @property
    def _limit(self) -> float:
        limit = self._request.max_tokens
        return float("inf") if limit == "fit" else limit

    def _token(self, index: int, text: str) -> Delta:
        place = self._lines[index].count
        asked = self._request
        return Delta(
            index=index,
            token_ids=(place,),
            texts=(text,),
            logprobs=(-0.5,) if asked.logprobs else (),
            top_logprobs=(((place, -0.5),),) if asked.top_logprobs else (),
        )

    def _add(self, delta: Delta) -> list[Message]:
        line = self._lines[delta.index]
        room = self._limit - line.count
        if room <= 0:
            return []
        if len(delta.token_ids) > room:
            kept = int(room)
            delta = Delta(
                index=delta.index,
                token_ids=delta.token_ids[:kept],
                texts=delta.texts[:kept],
                logprobs=delta.logprobs[:kept],
                top_logprobs=delta.top_logprobs[:kept],
            )
        line.deltas.append(delta)
        line.count += len(delta.token_ids)
        return [delta]

    def _choice(self, index: int, reason: FinishReason) -> Choice:
        line = self._lines[index]
        ids = tuple(one for delta in line.deltas for one in delta.token_ids)
        return Choice(
            index=index,
            text="".join(delta.text for delta in line.deltas),
            token_ids=ids,
            logprobs=tuple(one for delta in line.deltas for one in delta.logprobs),
            top_logprobs=tuple(one for delta in line.deltas for one in delta.top_logprobs),
            finish_reason="length" if line.count >= self._limit else reason,
            last_token_id=ids[-1] if ids else None,
            seed=self._seed,
        )
