"""OpenAI's requests for embeddings, there and back. No HTTP here: jobs without a gateway use it, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from streamfleet_common.errors import Unsupported
from streamfleet_common.one_shot import EmbedRequest
from streamfleet_common.schemas import End
from streamfleet_producer.gateway.openai_generation import invalid
from streamfleet_producer.gateway.openai_schemas import EmbeddingBody


def embedded_texts(body: EmbeddingBody) -> list[str]:
    """The texts of a request for embeddings.

    Raises:
        Unsupported: they are token ids.
        InvalidRequest: one is empty.
    """
    texts: list[str] = []
    for place, text in enumerate([body.input] if isinstance(body.input, str) else body.input):
        if not isinstance(text, str):
            raise Unsupported(
                "input: encoders read texts here, not token ids: send the texts themselves (LangChain: "
                "check_embedding_ctx_length=False)",
                feature="token ids as input of embeddings",
                problems=["input: not supported as token ids"],
            )
        if not text or text.isspace():
            where = "input" if isinstance(body.input, str) else f"input.{place}"
            raise invalid(f"{where}: it is empty: there is nothing to read")
        texts.append(text)
    return texts


def embed_request(body: EmbeddingBody, texts: Sequence[str], model: str | None) -> EmbedRequest:
    """The request for some of its texts. Raises InvalidRequest."""
    return EmbedRequest(texts=texts, model=model, dimensions=body.dimensions, truncate=bool(body.truncate))


def embeddings(body: EmbeddingBody, model: str, ends: Iterable[End]) -> dict[str, Any]:
    """The answer that these ends make, which are in the order of the texts."""
    as_text = body.encoding_format == "base64"
    data: list[dict[str, Any]] = []
    tokens = 0
    for end in ends:
        tokens += end.usage.prompt_tokens
        for one in end.embeddings:
            vector = one.base64 if as_text else one.vector.tolist()
            data.append({"object": "embedding", "index": len(data), "embedding": vector})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
