"""A queue in memory: what the scripts in Redis do for a producer and a worker, by the same rules.

Written for the tests of services; no Redis, no event loop. Times are the virtual clock's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from streamfleet_common import codec
from streamfleet_common.depth import Depth
from streamfleet_common.frames import Frame
from streamfleet_common.keys import Keys
from streamfleet_common.message import Message
from streamfleet_common.records import Record
from streamfleet_common.schemas import End, Envelope, Failure, Start, State
from streamfleet_common.submissions import Refused, Submission, Submitted
from streamfleet_producer.testing.virtual_time import Timer, VirtualTime

MAX_FRAME = 16_384
"""A frame over so many bytes is announced without its event, as by the scripts."""
LOG_LINGER_S = 60.0
PAGE = 1000


@dataclass(slots=True, eq=False)
class MemoryRequest:
    """One request and all that became of it."""

    envelope: Envelope
    digest: str
    accepted_at_ms: int
    deadline_at_ms: int
    state: State = "queued"
    epoch: int = 0
    seq: int = 0
    attempts: int = 0
    started_at_ms: int = 0
    crashes: int = 0
    log: list[bytes] = field(default_factory=list)
    end: bytes = b""
    """The frame of its end."""
    ended_at: float = 0.0
    expiry: Timer | None = None

    @property
    def is_open(self) -> bool:
        return self.state in ("queued", "running")

    def record(self, worker: str) -> Record:
        return Record(
            state=self.state,
            epoch=self.epoch,
            tenant=self.envelope.tenant,
            accepted_at_ms=self.accepted_at_ms,
            started_at_ms=self.started_at_ms,
            attempts=self.attempts,
            crashes=self.crashes,
            solo_losses=0,
            deadline_at_ms=self.deadline_at_ms if self.is_open else 0,
            owner=worker if self.state == "running" else "",
            digest=self.digest,
            end=Frame.parse(self.end) if self.end else None,
        )


class MemoryQueue:
    """One queue. `publish` sends a frame on a channel, `accepted` is told of each request taken in."""

    def __init__(
        self,
        keys: Keys,
        time: VirtualTime,
        publish: Callable[[str, bytes], None],
        accepted: Callable[[MemoryRequest], None],
        max_queue_depth: int,
    ) -> None:
        self.keys = keys
        self.max_queue_depth = max_queue_depth
        self.refusals: list[tuple[Refused, float]] = []
        """Why the next submissions are refused, and after how many seconds to try again."""
        self.closed: tuple[Refused, float] | None = None
        """The same for all from now on."""
        self.worker = "scripted"
        self._time = time
        self._publish = publish
        self._accepted = accepted
        self._requests: dict[str, MemoryRequest] = {}

    # --- a producer's steps

    def submit(self, submission: Submission) -> Submitted:
        """Take a request in; it is read from its bytes, as a worker does.

        Raises:
            Undecodable, InvalidRequest: no worker would understand it.
        """
        envelope = codec.decode_envelope(submission.payload)
        known = self._known(envelope.rid)
        if known is not None:
            same = (known.envelope.tenant, known.digest) == (envelope.tenant, submission.digest)
            return Submitted("duplicate" if same else "conflict", state=known.state)
        depth = self.depth().open
        refusal = self.refusals.pop(0) if self.refusals else self.closed
        if refusal is None and depth >= self.max_queue_depth:
            refusal = ("requests", 1.0)
        if refusal is not None:
            reason, retry_after_s = refusal
            return Submitted(
                "full",
                depth=depth,
                limit=self.max_queue_depth,
                reason=reason,
                retry_after_s=retry_after_s,
            )
        now_ms = self._time.server_ms()
        request = MemoryRequest(envelope, submission.digest, now_ms, now_ms + envelope.deadline_ms)
        self._requests[envelope.rid] = request
        deadline = self._time.time() + envelope.deadline_ms / 1000
        request.expiry = self._time.call_at(deadline, lambda: self._expire(request))
        self._accepted(request)
        return Submitted("accepted", depth=depth + 1)

    def cancel(self, rid: str, tenant: str) -> State | None:
        request = self._known(rid)
        if request is None or request.envelope.tenant != tenant:
            return None
        if request.is_open:
            error = Failure(code="cancelled", message="the request was cancelled")
            self._end(request, End(state="cancelled", error=error))
        return request.state

    def record(self, rid: str, tenant: str) -> Record | None:
        request = self._known(rid)
        if request is None or request.envelope.tenant != tenant:
            return None
        return request.record(self.worker)

    def events(self, rid: str, after: str) -> list[Frame]:
        request = self._known(rid)
        if request is None or (not request.is_open and self._time.time() - request.ended_at >= LOG_LINGER_S):
            return []
        frames = [Frame.parse(data) for data in request.log]
        if after != "-":
            epoch, seq = map(int, after.split("-"))
            frames = [frame for frame in frames if (frame.epoch, frame.seq) > (epoch, seq)]
        return frames[:PAGE]

    def depth(self) -> Depth:
        states = [request.state for request in self._requests.values()]
        return Depth(states.count("queued"), states.count("running"), self.max_queue_depth, 0)

    def waiting(self) -> list[MemoryRequest]:
        """Those that no worker has begun, in order of acceptance."""
        return [request for request in self._requests.values() if request.state == "queued"]

    # --- a worker's steps, of a request that is open

    def start(self, request: MemoryRequest, start: Start) -> None:
        request.epoch += 1
        request.seq = 0
        request.attempts += 1
        request.state = "running"
        request.started_at_ms = self._time.server_ms()
        self._tell(request, f"{request.epoch}-0{self._times(request)}", start)

    def emit(self, request: MemoryRequest, event: Message) -> None:
        """Show an event, if the request asked to see them."""
        if request.envelope.stream:
            request.seq += 1
            self._tell(request, f"{request.epoch}-{request.seq}", event)

    def finish(self, request: MemoryRequest, end: End) -> None:
        self._end(request, end)

    def lose(self, request: MemoryRequest) -> None:
        """Its worker is lost: it goes back to the queue, unless its policy has it fail."""
        request.crashes += 1
        policy = request.envelope.retry
        shown = request.envelope.on_restart == "fail" and request.seq > 0
        if shown or (policy.attempts is not None and request.attempts >= policy.attempts):
            error = Failure(
                code="generation_failed",
                message="its worker was lost, and the request may not be begun again: send it again",
                details={"retryable": True},
            )
            self._end(request, End(state="failed", error=error))
        else:
            request.epoch += 1
            request.state = "queued"

    # --- parts

    def _known(self, rid: str) -> MemoryRequest | None:
        request = self._requests.get(rid)
        if request is not None and not request.is_open:
            age_s = self._time.time() - request.ended_at
            if age_s >= request.envelope.result_ttl_ms / 1000:
                del self._requests[rid]
                return None
        return request

    def _expire(self, request: MemoryRequest) -> None:
        error = Failure(code="deadline_exceeded", message="not answered before its deadline")
        self._end(request, End(state="expired", error=error))

    def _end(self, request: MemoryRequest, end: End) -> None:
        if not request.is_open:
            return
        request.epoch += 1
        request.state = end.state
        request.ended_at = self._time.time()
        if request.expiry is not None:
            request.expiry.cancel()
        head = f"{request.epoch}-1{self._times(request)}"
        request.end = head.encode() + b" " + codec.encode(end)
        self._send(request, head, request.end)

    def _tell(self, request: MemoryRequest, head: str, event: Message) -> None:
        if request.envelope.stream:
            self._send(request, head, head.encode() + b" " + codec.encode(event))

    def _send(self, request: MemoryRequest, head: str, frame: bytes) -> None:
        if request.envelope.stream:
            request.log.append(frame)
        channel = self.keys.channel(request.envelope.tenant, request.envelope.rid)
        self._publish(channel, frame if len(frame) <= MAX_FRAME else head.encode() + b" ")

    def _times(self, request: MemoryRequest) -> str:
        now_ms = self._time.server_ms()
        return f",{request.accepted_at_ms},{request.started_at_ms},{now_ms},{request.attempts}"
