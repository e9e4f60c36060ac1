from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from served_handler import ServedHandler
from streamfleet_worker.engine.answer_cache import AnswerCache
from streamfleet_worker.handlers.handler import Handler

Serve = Callable[..., ServedHandler]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a handler until the test ends."""
    served: list[ServedHandler] = []

    def begin(handler: Handler, answers: AnswerCache | None = None) -> ServedHandler:
        served.append(ServedHandler(handler, answers))
        return served[-1]

    yield begin
    for one in served:
        one.close()
