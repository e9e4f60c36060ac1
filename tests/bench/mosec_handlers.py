"""mosec for `one_shot.py`; run by the Python of its own environment.

One worker process behind its Rust server, as its examples for batching are. JSON in and out, its default.
"""

from __future__ import annotations

import sys
from typing import Any

from mosec import Server, Worker

from one_shot_handlers import Serving

serving = Serving.read()


class Echo(Worker):  # type: ignore[misc]
    """The chosen handler."""

    def forward(self, data: list[Any]) -> list[Any]:
        return serving.run(data)


if __name__ == "__main__":
    # Its address and the level of its log are arguments of the process alone.
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(serving.port), "--log-level", "error"]
    server = Server()
    server.append_worker(
        Echo, num=1, max_batch_size=serving.max_batch_size, max_wait_time=serving.delay_ms, route="/predict"
    )
    server.run()
