"""A checked request with its prompt in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamfleet_common.schemas import Sampling
    from streamfleet_worker.engine.guide import Guide


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `GenerationEngine.prepare` gives; the fields of `GenerateRequest` in the model's own terms."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    n: int = 1
    cut_tokens: int = 0
    """Tokens that `truncate` took from the prompt."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the answer may not hold."""
    guide: Guide | None = None
    """Compiled; every row makes a matcher of its own of it."""
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    prefix: str = ""
    """What the answer's text begins with: the prompt's, if `echo` asks for it."""
    skip_special_tokens: bool = True
    candidates: tuple[int, ...] = ()
    """Tokens whose log-probabilities behind the prompt are asked for."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)
