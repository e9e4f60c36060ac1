"""OpenAI's routes, all of them."""

from __future__ import annotations

from streamfleet_producer.gateway import models, openai_chats, openai_completions, openai_embeddings

OPERATIONS = (
    *openai_completions.OPERATIONS,
    *openai_chats.OPERATIONS,
    *openai_embeddings.OPERATIONS,
    *models.OPERATIONS,
)
