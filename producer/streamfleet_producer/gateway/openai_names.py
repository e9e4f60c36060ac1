"""The texts of single tokens for log-probabilities, where the settings name the model's tokenizer."""

from __future__ import annotations

import asyncio

from streamfleet_producer.gateway.directory import Served
from streamfleet_producer.gateway.openai_logprobs import Names, unnamed
from streamfleet_producer.gateway.settings import GatewaySettings
from streamfleet_producer.gateway.tgi_vocabulary import vocabulary


async def names_of(settings: GatewaySettings, served: Served) -> Names:
    """What tells the text of a token of this model.

    Raises:
        Unsupported, TokenizerFailed: the file that the settings name cannot be read.
    """
    for name in (served.model, *(card.model for card in served.cards), served.queue):
        path = settings.tokenizers.get(name or "")
        if path is not None:
            # Read once, which takes a while.
            return (await asyncio.to_thread(vocabulary, path)).text
    return unnamed


def model_name(asked: str | None, served: Served) -> str:
    """How the answer calls the model: as it was asked for."""
    return asked or served.model or (served.cards[0].model if served.cards else served.queue)


def revision(served: Served) -> str:
    """Of the model, if all its workers have the same; else ""."""
    found = {card.revision for card in served.cards}
    return found.pop() if len(found) == 1 else ""
