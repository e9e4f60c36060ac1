"""The gateway that the command line starts: where it listens, what it warns of, and why it ended."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping

from streamfleet_producer.cli.log_lines import SERIOUS, read_record, worded
from streamfleet_producer.cli.processes import TiedProcess
from streamfleet_producer.cli.terminal import printable
from streamfleet_producer.cli.workers import environment

# `-P`: a file called like one of our imports, in the folder where the user happens to be, is none of ours.
COMMAND = (sys.executable, "-P", "-m", "streamfleet_producer.gateway")
NAME = "gateway "
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class GatewayProcess:
    """A gateway in a process tied to this one, followed by what it logs.

    `env` is its environment, whose settings it takes. `say` is told in words what it logs as a warning or
    worse, on another thread.
    """

    def __init__(self, env: Mapping[str, str], say: Callable[[str], None] = lambda _: None) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._url: str | None = None
        self._wants_keys = False
        self._held: list[str] = []
        self._process = TiedProcess(
            COMMAND, {**env, "STREAMFLEET_LOG_FORMAT": "json", "STREAMFLEET_LOG_LEVEL": "info"}, self._follow
        )

    @property
    def url(self) -> str | None:
        """Where it listens, without a slash at the end; None before it does."""
        with self._lock:
            return self._url

    @property
    def wants_keys(self) -> bool:
        """Whether requests have to bring an API key; known once it listens."""
        with self._lock:
            return self._wants_keys

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.status

    def why_ended(self) -> str:
        """The reason for its end, in one line."""
        for line in reversed(self._process.lines()):
            said = read_record(line)
            if said is None and line.strip():
                return line.strip()  # the last line of a traceback, or a complaint before the log was set up
            if said is not None and said.get("level") in ("error", "critical"):
                return str(said["event"])
        status = self.status or 0
        if status > 128:
            return f"it was killed by signal {status - 128}"
        return f"it ended with status {status} and gave no reason"

    def terminate(self) -> None:
        """Tell it to drain, without waiting."""
        self._process.terminate()

    def kill(self) -> None:
        """End it now."""
        self._process.close()

    def _follow(self, line: str) -> None:
        with self._lock:
            lines = self._heard(line)
        for words in lines:
            self._say(words)

    def _heard(self, line: str) -> list[str]:
        said = read_record(line)
        if said is not None and said["event"] == "gateway listens":
            self._url, self._wants_keys = str(said["url"]), said["keys"] == "wanted"
            held, self._held = self._held, []
            return held
        if said is not None and said.get("level") not in SERIOUS:
            return []
        words = line if said is None else worded(said)
        lines = [f"{NAME} │ {printable(part)}" for part in words.splitlines()]
        if self._url is not None or (said is not None and said["level"] == "warning"):
            return lines
        # What a gateway says that never serves is the reason for its end as a rule, and told as such.
        self._held += lines
        return []


class KeptGateway:
    """A gateway that is started again when it ends, after a pause, once it has served.

    `look` has to be called from time to time. `settings` are those of the gateway by field name. `say` is
    told in words what happens. `clock` gives seconds.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        say: Callable[[str], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._env = environment(settings)
        self._say = say
        self._clock = clock
        self._process = GatewayProcess(self._env, say)
        self._has_served = False
        self._is_awaited = False
        self._pause_s = FIRST_PAUSE_S
        self._again_at: float | None = None
        self.why_not: str | None = None
        """The reason why it did not even start."""

    @property
    def url(self) -> str | None:
        """Where it listens; None while it does not."""
        return self._process.url if self.status is None else None

    @property
    def wants_keys(self) -> bool:
        """Whether requests have to bring an API key; known once it listens."""
        return self._process.wants_keys

    @property
    def status(self) -> int | None:
        """The exit status of the process; None while it runs."""
        return self._process.status

    def look(self) -> None:
        """Start it again if it is time to."""
        if self.status is None:
            if self._is_awaited and self.url is not None:
                self._is_awaited = False
                self._say(f"{NAME}  is back")
            return
        if self._process.url is not None:
            self._has_served, self._pause_s = True, FIRST_PAUSE_S
        if not self._has_served:
            self.why_not = self._process.why_ended()
        elif self._again_at is None:
            self._again_at = self._clock() + self._pause_s
            why = self._process.why_ended()
            self._say(f"{NAME}  ended: {why}; it starts again in {self._pause_s:.0f} s")
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        elif self._clock() >= self._again_at:
            self._again_at = None
            self._process.kill()
            self._process = GatewayProcess(self._env, self._say)
            self._is_awaited = True

    def terminate(self) -> None:
        """Tell it to drain, without waiting."""
        self._process.terminate()

    def kill(self) -> None:
        """End it now; whoever still waits for an answer is told so."""
        self._process.kill()
