"""Everything that an encoder can be asked for, by kind of request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamfleet_common.decisions import DecideRequest
from streamfleet_common.errors import ModelNotFound
from streamfleet_common.one_shot import ClassifyRequest, EmbedRequest, RerankRequest
from streamfleet_worker.engine.base import unsupported
from streamfleet_worker.engine.encoder_input import InputBuilder
from streamfleet_worker.engine.tasks.classify import ClassifyTask
from streamfleet_worker.engine.tasks.decide import DecideTask, score_column
from streamfleet_worker.engine.tasks.embed import EmbedTask
from streamfleet_worker.engine.tasks.rerank import RerankTask
from streamfleet_worker.engine.token_cache import TokenCache

if TYPE_CHECKING:
    from streamfleet_common.schemas import Request
    from streamfleet_common.token_layout import TokenLayout
    from streamfleet_worker.engine.encoder_model import EncoderModel
    from streamfleet_worker.engine.item import Job


class EncoderTask:
    """The door of an engine that runs an encoder; safe to use from several threads.

    Args:
        encoder: what reads the texts.
        max_seq_len: the longest row, in tokens, control tokens included; None is what the model can read,
            and so is more than that.
        token_cache_bytes: what texts and their tokens may take that are kept; 0 keeps none.
    """

    def __init__(
        self, encoder: EncoderModel, *, max_seq_len: int | None = None, token_cache_bytes: int = 0
    ) -> None:
        self._encoder = encoder
        self.max_seq_len = min(encoder.max_positions, max_seq_len or encoder.max_positions)
        """The longest row, in tokens."""
        self.tokens = TokenCache(encoder.tokenizer.encode_piece, token_cache_bytes)
        """Texts to tokens; for whoever else needs them."""
        inputs = InputBuilder(encoder.tokenizer, self.tokens, self.max_seq_len)
        self._embed = EmbedTask(encoder, inputs)
        self._classify = ClassifyTask(encoder, inputs)
        self._rerank = RerankTask(encoder, inputs)
        self._decide = DecideTask(encoder, self.max_seq_len, self.tokens)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The kinds of request that it answers."""
        labels = self._encoder.labels
        if not labels:
            return ("embed",)
        decide = () if score_column(labels) is None else ("decide",)
        return ("rerank" if len(labels) == 1 else "classify", *decide)

    @property
    def layout(self) -> TokenLayout:
        """What stands around the texts of a request."""
        return self._decide.layout

    @property
    def counts(self) -> Mapping[str, int]:
        """Texts that were looked for in the cache, and those that were there."""
        return self.tokens.counts

    def prepare(self, request: Request, scope: str = "") -> Job:
        """Check a request and turn its texts into tokens.

        Raises:
            ModelNotFound: it names another model.
            InvalidRequest: it cannot be run here, and why; `TooLong`, `Unsupported` among them.
        """
        encoder = self._encoder
        if request.model is not None and request.model != encoder.name:
            raise ModelNotFound(
                f"this worker serves {encoder.name!r}, not {request.model!r}", known=[encoder.name]
            )
        match request:
            case EmbedRequest():
                return self._embed.prepare(request, scope)
            case ClassifyRequest():
                return self._classify.prepare(request, scope)
            case RerankRequest():
                return self._rerank.prepare(request, scope)
            case DecideRequest():
                return self._decide.prepare(request, scope)
        raise unsupported(request, encoder.name, self.tasks)
