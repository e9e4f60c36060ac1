"""A compiled form, and how far answers have come in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from streamfleet_common.errors import GenerationFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# What a form may cost: time to compile it (50,000 units of fuel a millisecond), time for one mask (14,000
# units or 20,000 items a millisecond), memory (a few hundred bytes a state).
_LIMITS: Any = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 50_000,
    "max_items_in_row": 16_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    # It takes seconds for some forms, and then masks are hardly faster.
    "precompute_large_lexemes": False,
    # They would hold parts of an answer.
    "verbose_errors": False,
}


class CompiledGuide:
    """A compiled form; a `Guide`.

    Its matchers share what they learn of it. When they have learned as much as it may remember, each goes on
    with a memory of its own.
    """

    def __init__(self, vocabulary: LLTokenizer, grammar: str, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._first = self.fresh()

    def fresh(self) -> LLMatcher:
        """The library's own matcher at the start of the answer, that shares nothing with others."""
        # Without the library there is no guide, but this module is imported all the same.
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

        return LLMatcher(self._vocabulary, self._grammar, log_level=0, limits=LLParserLimits(**_LIMITS))

    def fault(self) -> str:
        """Why no answer can begin, in the library's words; "" if one can."""
        first = self._first.deep_copy()
        if first.is_error():
            return first.get_error()
        mask = torch.zeros(-(-self._vocab_size // 32), dtype=torch.int32)
        first.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if "NoExtension" in first.get_error() or not mask.any():
            return "nothing fits it"
        return first.get_error()

    def matcher(self) -> TokenMatcher:
        """A matcher at the start of the answer."""
        return TokenMatcher(self, self._first.deep_copy())

    def forget(self) -> None:
        """Let later matchers begin with a new memory."""
        self._first = self.fresh()


class TokenMatcher:
    """How far one answer has come; a `Matcher`."""

    def __init__(self, guide: CompiledGuide, matcher: LLMatcher) -> None:
        self._guide = guide
        self._matcher = matcher
        self._answer: list[int] = []

    def fill(self, bitmask: torch.Tensor) -> None:
        """Set the bits of the tokens that may come next.

        Args:
            bitmask: int32 `[ceil(vocab_size / 32)]`, contiguous, on the CPU; low bits first.

        Raises:
            GenerationFailed: the form has become too complex to follow.
        """
        self._matcher.unsafe_compute_mask_ptr(bitmask.data_ptr(), bitmask.nbytes)
        if self._matcher.is_error():
            self._go_on_alone()
            self._matcher.unsafe_compute_mask_ptr(bitmask.data_ptr(), bitmask.nbytes)
            if self._matcher.is_error():
                raise self._failure()

    def accept(self, token_id: int) -> None:
        """Go on by a token that the mask allowed; an end token may come where the form is complete.

        Raises:
            GenerationFailed: the token does not fit, or the form has become too complex to follow.
        """
        if not self._matcher.consume_token(token_id):
            self._go_on_alone()
            if not self._matcher.consume_token(token_id):
                raise self._failure()
        self._answer.append(token_id)

    def _go_on_alone(self) -> None:
        # All that share a memory fail once it is full, and this answer may not be the one that filled it.
        self._matcher = self._guide.fresh()
        self._guide.forget()
        if not self._matcher.consume_tokens(self._answer):
            raise self._failure()

    def _failure(self) -> GenerationFailed:
        return GenerationFailed(
            f"the guide cannot be followed behind {len(self._answer)} tokens: the next one does not fit, or "
            "the form allows too much here: bound its repetitions and the lengths of its strings lower"
        )
