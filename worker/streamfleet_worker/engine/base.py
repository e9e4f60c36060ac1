"""The one face of every engine, and the values that pass through it.

An engine belongs to one thread: `add`, `cancel`, `step`, `due_in`, `room` and `close` are called
from it alone. `info` is constant, and `prepare` may be called from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from streamfleet_common.decisions import Decision
from streamfleet_common.errors import Unsupported
from streamfleet_common.one_shot import Classification, Embedding, HandlerCard, Rank
from streamfleet_common.schemas import Choice, EndState, Prefill, Request, Timing, Usage
from streamfleet_common.token_layout import TokenLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from streamfleet_common.errors import StreamfleetError

Key = tuple[str, int]
"""A request in one epoch: (rid, epoch). Coming back in a later epoch, it is another key."""

LaunchReason = Literal["full", "delay", "waited", "ratio", "deadline", "drain"]
"""Why a batch was launched, or newcomers were let into the running one, just then:

* full: a micro-batch was full; or those that waited for rows were as many as there were free.
* delay: nothing ran, and the oldest had waited `max_delay` for company.
* waited: rows ran, and newcomers had waited `max_waiting_tokens` steps or `max_waiting` seconds, or until
  another had computed the beginning of the prompt that they share.
* ratio: rows ran, and newcomers were enough for the running to be held up for them.
* deadline: one of them would have missed its deadline.
* drain: the worker takes nothing in any more, so no company would have come.

Those of a micro-batch, which never joins one that runs, are `full`, `delay` and `drain`.
"""
LAUNCH_REASONS: tuple[LaunchReason, ...] = get_args(LaunchReason)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves; constant while it lives. Lengths in tokens."""

    model: str
    revision: str
    tasks: tuple[str, ...]
    device: str
    """The device in words, as an operator would say it."""
    precision: str
    max_batch_size: int
    max_seq_len: int
    vocab_size: int
    """0 if the engine knows no tokens."""
    exact: str = ""
    """The class of workers on which a request gets these very bits, alone and in any company, now and at
    each further try; "" if that cannot be promised."""
    window: int = 1
    """How many batches of rows a worker may hold: more than one, where those that wait are sorted."""
    handler: HandlerCard | None = None
    """Of an engine that runs a handler, whose name is then `model`."""
    layout: TokenLayout | None = None
    """What it puts around the texts of a request; None if nobody else can count them."""

    @property
    def max_rows(self) -> int:
        """Rows that a worker holds at most, running and waiting."""
        return self.window * self.max_batch_size


class Ready(Protocol):
    """A request made ready by an engine's `prepare`. What else it holds is that engine's own.

    That of a `GenerateRequest` says how many `prompt_tokens` it has, too.
    """

    @property
    def n(self) -> int:
        """Rows of the batch that it takes: one for each answer, or for each option of a question."""


def unsupported(request: Request, model: str, tasks: Sequence[str]) -> Unsupported:
    """The error for a request of a kind that a model does not do; `tasks` are those that it does."""
    return Unsupported(
        f"{model!r} does {', '.join(tasks)}, not {request.kind}: "
        "send the request to a queue whose workers do",
        feature=request.kind,
    )


@dataclass(slots=True)
class Arrival:
    """A request on its way into the engine. Times are seconds on the engine's clock."""

    prepared: Any
    """The `Ready` that this engine's `prepare` made of the request."""
    accepted_at: float
    """When the fleet accepted the request, which may be long before this worker saw it: `max_delay`
    runs from here."""
    deadline_at: float
    """When the request expires."""
    scope: str = ""
    """Whose request it is, in any words: what was computed for one is never given to another."""

    @property
    def rows(self) -> int:
        """Rows of the batch that the request takes."""
        rows: int = self.prepared.n
        return rows


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine could take now, in rows; a request with n choices takes n of them.

    One that takes more than are free may be added all the same: its choices wait in the engine.
    """

    rows: int
    """Rows that may be added and would run in the next batch."""
    running: int
    """Rows in the batch."""
    waiting: int
    """Rows added, but not yet in the batch."""
    cache_used: float | None = None
    """The share of the cache for keys and values that is reserved for what runs; None if there is none."""


@dataclass(slots=True)
class Tokens:
    """New tokens of one choice; parallel lists, as in the wire's `Delta`.

    `logprobs` and `top_logprobs` are empty unless asked for; the latter has the likeliest tokens at each
    place with their log-probabilities, best first.
    """

    index: int
    token_ids: list[int]
    texts: list[str]
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)


@dataclass(slots=True)
class Parts:
    """New parts of a handler's output, as in the wire's `Parts`."""

    values: list[Any]


@dataclass(frozen=True, slots=True)
class Launch:
    """A batch that was launched: a micro-batch, or the running rows as they were when newcomers joined."""

    number: int
    """The engine counts them from 1."""
    reason: LaunchReason
    size: int
    """Its items; or the rows that run, newcomers among them."""
    tokens: int
    """Those that it begins with, and what fills its rows up to one length. Of running rows: what is to be
    computed of the newcomers' prompts, and one for each other row."""
    padded_ratio: float
    """Which share of these fills rows up, from 0 to 1; running rows are never filled up."""
    keys: tuple[Key, ...]
    """Whose items or rows they are, each once, newcomers first."""


@dataclass(slots=True)
class Finished:
    """The last output of a key. `error` is set if and only if the state is not "done"."""

    state: EndState
    choices: tuple[Choice, ...] = ()
    answers: tuple[Decision, ...] = ()
    """Of a `DecideRequest`, in the order of its questions."""
    embeddings: tuple[Embedding, ...] = ()
    classifications: tuple[Classification, ...] = ()
    ranking: tuple[Rank, ...] = ()
    outputs: tuple[Any, ...] = ()
    """Of a handler: its output, or every part of it."""
    prefill: Prefill | None = None
    usage: Usage = field(default_factory=Usage)
    seed: int | None = None
    timing: Timing = field(default_factory=Timing)
    error: StreamfleetError | None = None
    retry_after_s: float | None = None
    """Of one that failed: try it again after so long, if it may be tried again at all. None leaves that to
    the error and to the request's own policy."""
    launch: Launch | None = None
    """The batch that it ran in, of several the last; None if none was needed, or none came."""


@dataclass(slots=True)
class Output:
    """Something a step brought forth for one key."""

    key: Key
    event: Prefill | Tokens | Parts | Finished


@dataclass(slots=True)
class Step:
    """What one step did."""

    outputs: list[Output]
    """In order for each key; after its `Finished` a key never shows again."""
    rows: int = 0
    """Rows of the batch: those that decode, or a micro-batch's items."""
    prompt_tokens: int = 0
    """Prompt tokens computed."""
    generated_tokens: int = 0
    asked_tokens: int = 0
    """Prompt tokens that were looked for in the prefix cache."""
    cached_tokens: int = 0
    """Those of them that were there, and need not be computed."""
    padded_tokens: int = 0
    """Of a micro-batch: its tokens, and what fills its rows up to one length."""
    device_s: float = 0.0
    """Of a micro-batch: seconds that it was computed."""
    launches: list[Launch] = field(default_factory=list)
    """Batches that began in this step."""


class Engine(Protocol):
    """Anything that turns requests into outputs, batch by batch."""

    @property
    def info(self) -> EngineInfo:
        """What this engine serves."""

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes taken now, by use; may be read from any thread."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What its caches and doors have counted so far, by name; may be read from any thread."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from any thread, when `step` has got something to do that nobody has ordered.

        To be called once, before anything else.
        """

    def prepare(self, request: Request, scope: str = "", /) -> Ready:
        """Check a request and make it ready (tokens of its prompt); callable from any thread.

        `scope` is the one that its `Arrival` will have.

        Raises:
            InvalidRequest: it cannot be run here, and why; `TooLong`, `Unsupported` among them.
        """

    def add(self, arrivals: Mapping[Key, Arrival]) -> None:
        """Take requests in. They run when the batching policy says so."""

    def cancel(self, keys: Collection[Key]) -> None:
        """Forget these keys: they leave before the next forward pass and bring forth nothing more.

        Unknown keys are ignored.
        """

    def drain(self) -> None:
        """Let nobody wait for company from now on: hardly any will come."""

    def step(self) -> Step:
        """Run at most one forward pass for the batch, and one for newcomers.

        Never raises for one request's fault.
        """

    def due_in(self) -> float | None:
        """Seconds until `step` has something to do: 0 is now, None is not before an `add`."""

    def room(self) -> Room:
        """What could be added now."""

    def close(self) -> None:
        """Free the model. Nothing else may be called afterwards."""
