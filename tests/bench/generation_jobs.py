"""The requests that every side of `generation.py` answers: chat prompts and answers of mixed lengths."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from generation_side import Job
from streamfleet_common.schemas import ChatMessage, GenerateRequest

if TYPE_CHECKING:
    from streamfleet_worker.engine.tokenizer import Tokenizer

TOPICS = (
    "the capital of France", "how bread is baked", "why the sky is blue", "a short story about a fox",
    "the rules of chess", "what a hash table is", "how to plant a tree", "the history of the bicycle",
    "three facts about whales", "a poem about rain", "how vaccines work", "the seasons of the year",
    "how to boil an egg", "what gravity is", "the planets of the solar system", "how rivers form",
)  # fmt: skip
STYLES = ("Tell me about", "Explain in detail", "Write one sentence on", "What should I know of")
FILLER = " Be kind, be clear, and use plain words."
FILLERS = (0, 0, 0, 1, 2, 5)
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128)


def make_jobs(tokenizer: Tokenizer, count: int, scale: float) -> list[Job]:
    """The same ones each time; `scale` is a factor on the answers' lengths."""
    source = random.Random(7)
    jobs = []
    for _ in range(count):
        about = f"{source.choice(STYLES)} {source.choice(TOPICS)}." + FILLER * source.choice(FILLERS)
        ids = tokenizer.render((ChatMessage(role="user", content=about),))
        jobs.append(Job(list(ids), max(1, int(source.choice(LENGTHS) * scale))))
    return jobs


def request_of(job: Job, **fields: Any) -> GenerateRequest:
    """What a job is on the wire."""
    return GenerateRequest(prompt_token_ids=tuple(job.prompt_token_ids), max_tokens=job.max_tokens, **fields)
