"""Token layouts: how many tokens a worker puts around the texts of a request, so that others can count it."""

from __future__ import annotations

from pydantic import Field

from streamfleet_common.message import Message, Text


class TokenLayout(Message):
    """What a model's tokenizer does not tell by itself. Numbers are tokens.

    With it and the tokenizer a request can be counted, and refused, where the model is not.
    """

    text: int = Field(default=0, ge=0)
    """Around one text."""
    pair: int = Field(default=0, ge=0)
    """Around two texts that are read together, and between them."""
    state: int = Field(default=0, ge=0)
    """Before the state of questions."""
    question: int = Field(default=0, ge=0)
    """Between a question and each of its options."""
    option: int = Field(default=0, ge=0)
    """Behind an option."""
    option_prefix: Text = ""
    """What stands before an option in one text with it; "" where it is a text by itself."""
