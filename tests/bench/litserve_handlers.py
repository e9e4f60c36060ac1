"""LitServe for `one_shot.py`; run by the Python of its own environment.

Set as its documentation says for hundreds of requests a second: ZeroMQ instead of its queues, one HTTP server
for one worker, no timeouts to keep. uvloop and httptools are there, so uvicorn takes them.
"""

from __future__ import annotations

from typing import Any

import litserve

from one_shot_handlers import Serving

serving = Serving.read()


class Echo(litserve.LitAPI):  # type: ignore[misc]
    """The chosen handler."""

    def setup(self, device: str) -> None:
        pass

    def predict(self, batch: list[Any]) -> list[Any]:
        return serving.run(batch)


if __name__ == "__main__":
    api = Echo(max_batch_size=serving.max_batch_size, batch_timeout=serving.delay_ms / 1000)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=False, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=serving.port,
        num_api_servers=1,
        log_level="error",
        generate_client_file=False,
        access_log=False,
    )
