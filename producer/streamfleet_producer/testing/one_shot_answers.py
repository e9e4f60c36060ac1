"""The ends of one-shot requests, made of what a script says in Python's own values."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from streamfleet_common.decisions import DecideRequest, Decision, Question
from streamfleet_common.one_shot import (
    Classification,
    ClassifyRequest,
    Embedding,
    EmbedRequest,
    Label,
    Rank,
    RerankRequest,
)
from streamfleet_common.schemas import End, Request, Usage
from streamfleet_producer.testing.script import texts_of


def one_shot_end(request: Request, said: Any) -> End:
    """The end of a request that is answered whole.

    Of embed a vector for each text, of classify a map of label to score for each text, of rerank a score for
    each document, of decide a map of question to its option, or to a map of option to score.

    Raises:
        ValueError: the script says something else.
    """
    usage = Usage(prompt_tokens=sum(len(text.split()) for text in texts_of(request)))
    match request:
        case EmbedRequest():
            vectors = [_embedding(vector) for vector in _as_many(said, request.texts)]
            return End(state="done", embeddings=tuple(vectors), usage=usage)
        case ClassifyRequest():
            found = [_classification(scores, request.top_k) for scores in _as_many(said, request.texts)]
            return End(state="done", classifications=tuple(found), usage=usage)
        case RerankRequest():
            scores = [float(score) for score in _as_many(said, request.documents)]
            # Of equals the one given first, as sorting keeps them.
            order = sorted(range(len(scores)), key=lambda place: -scores[place])
            ranks = [Rank(index=place, score=scores[place]) for place in order[: request.top_n]]
            return End(state="done", ranking=tuple(ranks), usage=usage)
        case DecideRequest():
            if not isinstance(said, Mapping):
                raise ValueError("a map of question to option is wanted")
            answers = [_decision(question, said, request) for question in request.questions]
            return End(state="done", answers=tuple(answers), usage=usage)
        case _:
            raise ValueError(f"a {request.kind} request is not answered whole")


def _as_many(said: Any, items: Sequence[str]) -> Sequence[Any]:
    if isinstance(said, str | bytes | Mapping) or not isinstance(said, Sequence):
        raise ValueError("a list is wanted, or a function that makes one of the request")
    if len(said) != len(items):
        raise ValueError(f"{len(said)} answers for {len(items)} items")
    return said


def _embedding(vector: Sequence[float]) -> Embedding:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return Embedding(data=numbers.tobytes())


def _classification(scores: Mapping[str, float], top_k: int | None) -> Classification:
    labels = sorted(scores.items(), key=lambda pair: -pair[1])[:top_k]
    return Classification(labels=tuple(Label(label=label, score=float(score)) for label, score in labels))


def _decision(question: Question, said: Mapping[str, Any], request: DecideRequest) -> Decision:
    choices = question.choices
    if question.id not in said:
        raise ValueError(f"nothing is said of the question {question.id!r}")
    answer = said[question.id]
    if isinstance(answer, Mapping):
        if set(answer) != set(choices):
            raise ValueError(f"the question {question.id!r} has other options")
        scores = [float(answer[option]) for option in choices]
    elif answer in choices:
        # So that the option said has most of the probability, and the others have some.
        scores = [0.0 if option == answer else math.log(0.01) for option in choices]
    else:
        raise ValueError(f"the question {question.id!r} has no such option")
    return Decision.of(question, scores, request.temperature(len(choices)))
