"""Ray Serve for `one_shot.py`; run by the Python of its own environment.

One replica, set for throughput as its documentation says (`RAY_SERVE_THROUGHPUT_OPTIMIZED`), which takes
requests itself, and allowed as many at once as are sent: by default it is five, fewer than a batch. A handler
that holds its thread has one of its own, which made it a third faster; the no-op was faster without.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from typing import Any

from one_shot_handlers import Serving

serving = Serving.read()
IN_FLIGHT = 1024

os.environ |= {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1" if serving.handler == "sleep" else "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(serving.port),
    "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(serving.port + 1),
}

from ray import init, serve, shutdown  # noqa: E402 (it reads the environment when it is imported)


@serve.deployment(num_replicas=1, max_ongoing_requests=IN_FLIGHT, ray_actor_options={"num_cpus": 1})
class Echo:
    """The chosen handler."""

    @serve.batch(  # type: ignore[untyped-decorator]
        max_batch_size=serving.max_batch_size, batch_wait_timeout_s=serving.delay_ms / 1000
    )
    async def predict(self, batch: list[Any]) -> list[Any]:
        return serving.run(batch)

    async def __call__(self, request: Any) -> Any:
        return await self.predict(await request.json())


if __name__ == "__main__":
    application: Any = Echo
    with tempfile.TemporaryDirectory() as folder:
        init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        try:
            # Requests go to the replica itself; its proxy only has to be out of the way.
            serve.start(http_options={"host": "127.0.0.1", "port": serving.port + 1})
            serve.run(application.bind(), route_prefix="/predict")
            signal.pause()
        finally:
            shutdown()
