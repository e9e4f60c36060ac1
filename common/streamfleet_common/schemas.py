"""What crosses the wire: requests, the envelope they travel in, and events.

All models are frozen, strict (no `"7"` for 7, no `True` for 1), refuse unknown fields and non-finite
numbers, and bound every length. A new field always comes with a default, so that a peer one version
older stays understood. Times are milliseconds: absolute ones (`…_at_ms`) on the Redis server's clock.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from streamfleet_common import errors
from streamfleet_common.chat import ChatMessage as ChatMessage  # noqa: PLC0414 (it is looked for here)
from streamfleet_common.chat import Tool as Tool  # noqa: PLC0414
from streamfleet_common.chat import ToolCall as ToolCall  # noqa: PLC0414
from streamfleet_common.chat import Tools, Turns
from streamfleet_common.decisions import DecideRequest, Decision
from streamfleet_common.message import (
    SEQUENCE,
    Ids,
    Logprobs,
    LongText,
    Message,
    Name,
    Rid,
    Said,
    Tenant,
    Text,
    Texts,
    TokenId,
    TopLogprobs,
)
from streamfleet_common.one_shot import (
    CallRequest,
    Classification,
    ClassifyRequest,
    Embedding,
    EmbedRequest,
    Json,
    Rank,
    RerankRequest,
)

MAX_TOKENS = 32_768
MAX_DEADLINE_MS = 24 * 3600 * 1000
MAX_RESULT_TTL_MS = 7 * 24 * 3600 * 1000

Lane = Literal["high", "normal", "bulk"]
LANES: tuple[Lane, ...] = ("high", "normal", "bulk")
EndState = Literal["done", "failed", "cancelled", "expired", "dead"]
State = Literal["queued", "running"] | EndState
FinishReason = Literal["eos", "stop", "length", "cancelled", "expired", "error"]


# --- requests


def _as_json(value: Any) -> Any:
    try:
        if isinstance(value, Mapping):
            return json.dumps(value, allow_nan=False)
        if isinstance(value, str):
            json.loads(value)
    except (TypeError, ValueError, RecursionError):
        # Without the error's own words, which may quote the value.
        raise ValueError("a JSON document is wanted, or a map that makes one") from None
    return value


if TYPE_CHECKING:
    # Whoever builds a request may write a list; what it then holds is a tuple all the same.
    _PromptIds = Sequence[int]
    _StopIds = Sequence[int]
    _Stops = Sequence[str]
    _Options = Sequence[str]
    _Bias = Mapping[int, float] | Sequence[tuple[int, float]]
    _Schema = str | Mapping[str, Any]
else:
    _PromptIds = Annotated[tuple[TokenId, ...], Field(strict=False, max_length=MAX_TOKENS)]
    _StopIds = Annotated[tuple[TokenId, ...], Field(strict=False, max_length=64)]
    _Stops = Annotated[
        tuple[Annotated[Text, Field(min_length=1, max_length=64)], ...],
        Field(strict=False, max_length=8),
    ]
    _Options = Annotated[
        tuple[Annotated[Text, Field(min_length=1, max_length=1000)], ...],
        Field(strict=False, min_length=1, max_length=256),
    ]
    # Pairs, since JSON and many languages have no maps with numbers as keys; whoever has one may give it.
    _Bias = Annotated[
        tuple[Annotated[tuple[TokenId, Annotated[float, Field(ge=-1000.0, le=1000.0)]], SEQUENCE], ...],
        BeforeValidator(lambda value: tuple(value.items()) if isinstance(value, Mapping) else value),
        Field(strict=False, max_length=1000),
    ]
    _Schema = Annotated[
        Annotated[str, Field(max_length=64 * 1024)],
        BeforeValidator(_as_json),
    ]


class Sampling(Message):
    """How the next token is drawn. The default is greedy: the likeliest token, always.

    The order is: `logit_bias`, `repetition_penalty`, the two other penalties, `bad_words`, the end tokens
    while `min_tokens` is not reached, the guide. Then comes the likeliest token, of equals the one of lowest
    id; or `temperature`, `min_p`, `top_k`, `top_p` of what these leave, `typical_p` of what that leaves, and
    the draw. Log-probabilities are those of the model, before all of it.
    """

    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """0 is greedy; the cuts and the seed then have no effect."""
    top_k: int = Field(default=0, ge=0, le=1_000_000)
    """Draw from the k likeliest tokens only, and from equals of the last of them; 0 draws from all."""
    top_p: float = Field(default=1.0, ge=0.0, le=1.0)
    """Draw from the smallest set of likeliest tokens whose probabilities reach `top_p`; 1 draws from all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Draw from tokens at least this many times as likely as the likeliest; 0 draws from all."""
    typical_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the tokens whose surprise is nearest to the expected one, until their probabilities reach
    `typical_p`; 1 draws from all."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    """Logits of tokens of the prompt and the answer are divided by it if positive, else multiplied."""
    presence_penalty: float = Field(default=0.0, ge=-10.0, le=10.0)
    """Taken from the logit of each token that the answer holds already."""
    frequency_penalty: float = Field(default=0.0, ge=-10.0, le=10.0)
    """The same, times how often it holds it."""
    logit_bias: _Bias = ()
    """Added to the logits of tokens: a map, or pairs, of token id and number."""
    bad_words: _Stops = ()
    """Strings the answer may not hold as a run of whole tokens, at the start of a word or within."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """The same seed and request give the same draw. None lets the worker choose; the answer names it."""


class Guide(Message):
    """A form that the answer must have; exactly one of these."""

    json_schema: _Schema | None = None
    """A JSON schema, as text or as a map. The answer is a JSON document that fits it; `{}` allows any."""
    regex: Annotated[Text, Field(min_length=1, max_length=4096)] | None = None
    """A regular expression that the whole answer matches."""
    choice: _Options | None = None
    """The answer is one of these strings."""

    @model_validator(mode="after")
    def _one_form(self) -> Guide:
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"give exactly one of json_schema, regex and choice (found {found})")
        return self


class GenerateRequest(Message):
    """Text to be continued: exactly one of `prompt`, `prompt_token_ids` and `messages`."""

    kind: Literal["generate"] = "generate"
    model: Name | None = None
    """When given, the queue must serve this model."""
    prompt: LongText | None = None
    prompt_token_ids: _PromptIds | None = None
    messages: Turns | None = None
    tools: Tools = ()
    """What the model may ask its caller to do; its template tells it how. Only with `messages`."""
    max_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MAX_TOKENS)] | Literal["fit"],
        Said(f'Input should be an integer from 1 to {MAX_TOKENS}, or "fit"'),
    ] = 128
    """At most this many tokens are generated; "fit" takes what the prompt leaves of the model's length."""
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """No end token, no `stop_token_ids` and no `stop` ends the text before so many tokens."""
    n: int = Field(default=1, ge=1, le=64)
    """How many answers are generated; each draws with a seed of its own."""
    truncate: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Cut the prompt to so many tokens if it has more; the usage says how many were cut. None never cuts."""
    truncate_side: Literal["left", "right"] = "left"
    """Where tokens are cut: "left" keeps the end of the prompt, "right" its start."""
    sampling: Sampling = Sampling()
    guide: Guide | None = None
    """A form that the answer must have."""
    stop: _Stops = ()
    """Literal strings that end the text, wherever they begin or end within tokens."""
    include_stop: bool = False
    """Keep the stop string that was met in the text."""
    stop_token_ids: _StopIds = ()
    """Token ids that end the text, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    logprobs: bool = False
    """Report the log-probability of each generated token."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """Report so many of the likeliest tokens at each place, of the prompt too with `prompt_logprobs`."""
    prompt_logprobs: bool = False
    """Report the prompt's tokens with their log-probabilities in a `prefill`."""
    echo: bool = False
    """Begin the answer's text with the prompt's."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""

    @model_validator(mode="after")
    def _consistent(self) -> GenerateRequest:
        if isinstance(self.max_tokens, int) and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set it to true")
        if self.guide is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ValueError(f"{name} and guide exclude each other: the guide says where the answer ends")
        return self

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateRequest:
        prompts = {
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "messages": self.messages,
        }
        given = [name for name, value in prompts.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"give exactly one of prompt, prompt_token_ids and messages (found {found})")
        value = prompts[given[0]]
        if not value or (isinstance(value, str) and value.isspace()):
            raise ValueError(f"{given[0]} is empty: there is nothing to continue")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages: it is the model's chat template that tells it of them")
        return self


def _kind(value: Any) -> Any:
    # A default, which every sender may leave out.
    return value.get("kind", "generate") if isinstance(value, dict) else getattr(value, "kind", None)


Request = Annotated[
    Annotated[GenerateRequest, Tag("generate")]
    | Annotated[DecideRequest, Tag("decide")]
    | Annotated[EmbedRequest, Tag("embed")]
    | Annotated[ClassifyRequest, Tag("classify")]
    | Annotated[RerankRequest, Tag("rerank")]
    | Annotated[CallRequest, Tag("call")],
    Discriminator(
        _kind,
        custom_error_type="kind",
        custom_error_message="a map is wanted whose kind is one of "
        "generate, decide, embed, classify, rerank and call",
    ),
]
"""Everything a worker can be asked for."""


def new_rid(shard: int = 0) -> str:
    """A fresh request id: two hex digits of shard, then 128 random bits."""
    return f"{shard:02x}{secrets.token_hex(16)}"


def new_rids(count: int, shard: int = 0) -> list[str]:
    """Fresh request ids, from one call for random bits."""
    bits = secrets.token_hex(16 * count)
    return [f"{shard:02x}{bits[at : at + 32]}" for at in range(0, len(bits), 32)]


class Retry(Message):
    """How often a request may be tried, and how long to wait between two tries."""

    attempts: int | None = Field(default=None, ge=1, le=100)
    """At most so many workers start it; 1 never tries again. None leaves it to the fleet: lost workers are
    made good until the request itself is suspected, and a retryable failure is tried three times in all."""
    backoff_ms: int = Field(default=0, ge=0, le=3_600_000)
    """Milliseconds between a failure and the next try, doubled each time; then it keeps its old place."""


class Envelope(Message):
    """A request with everything the fleet needs to carry it."""

    rid: Rid = Field(default_factory=new_rid)
    tenant: Tenant = "default"
    lane: Lane = "normal"
    stream: bool = False
    """Publish tokens as they come and keep a log of them, instead of the end alone."""
    deadline_ms: int = Field(default=600_000, ge=1, le=MAX_DEADLINE_MS)
    """Milliseconds from acceptance after which the request ends as expired."""
    on_restart: Literal["restart", "fail"] = "restart"
    """What to do when the worker is lost and the text must begin again."""
    retry: Retry = Retry()
    idempotency_key: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    result_ttl_ms: int = Field(default=600_000, ge=1_000, le=MAX_RESULT_TTL_MS)
    """Milliseconds for which the result stays readable after the end."""
    traceparent: Annotated[str, Field(pattern=r"^[0-9a-f-]{55}$")] | None = None
    request: Request

    def around(self, rid: str, request: Request) -> Envelope:
        """The same envelope for another request; neither argument is validated."""
        return self.changed({"rid": rid, "request": request})


# --- events


class Start(Message):
    """A worker has taken the request. Opens every epoch of a streaming request."""

    type: Literal["start"] = "start"
    worker: Name
    model: Name
    revision: Name = ""
    queued_at_ms: int = 0
    started_at_ms: int = 0
    exact: Name = ""
    """The class of workers on which this request gets these very bits, alone and in any company; "" when
    that cannot be promised."""


class Prefill(Message):
    """The prompt as the model saw it; parallel arrays. The first logprob is None: nothing precedes it.

    It comes once, before the first choice's deltas; other choices may be ahead of it.

    `top_logprobs` is empty unless asked for; its first list is empty.
    """

    type: Literal["prefill"] = "prefill"
    token_ids: Ids
    texts: Texts
    logprobs: Logprobs
    top_logprobs: TopLogprobs = ()


class Delta(Message):
    """New tokens of one choice; parallel arrays.

    A text is what could be shown once its token was there: "" while a character or a possible stop string
    is incomplete. An answer that is cut off may show what was held back in a last text that has no token.
    All texts of a choice, joined, are its final text. `logprobs` and `top_logprobs` are empty
    unless asked for; the latter has the likeliest tokens and their log-probabilities, best first.
    """

    type: Literal["delta"] = "delta"
    index: int = Field(default=0, ge=0)
    token_ids: Ids
    texts: Texts
    logprobs: Logprobs = ()
    top_logprobs: TopLogprobs = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Parts(Message):
    """What a handler has given since the last event, of an output that comes in parts."""

    type: Literal["parts"] = "parts"
    values: Annotated[tuple[Json, ...], SEQUENCE]


class Restart(Message):
    """What was shown so far is void: the request runs again from its first token."""

    type: Literal["restart"] = "restart"
    reason: Annotated[str, Field(max_length=1000)]


class Choice(Message):
    """One whole answer. `token_ids` holds every generated token, the ending one included.

    `last_token_id` is None when nothing was generated; `logprobs` and `top_logprobs` are empty unless asked
    for. `seed` is the one that drew this answer: a request with it and `n` = 1 draws it again.
    """

    index: int = Field(default=0, ge=0)
    text: Text
    token_ids: Ids
    logprobs: Logprobs = ()
    top_logprobs: TopLogprobs = ()
    finish_reason: FinishReason
    last_token_id: TokenId | None = None
    seed: int | None = None


class Usage(Message):
    """Tokens read and written, over all choices."""

    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)
    cached_tokens: int = Field(default=0, ge=0)
    """Of the prompt's tokens those whose keys and values were there already."""
    cut_tokens: int = Field(default=0, ge=0)
    """Tokens of the prompt that were cut because `truncate` asked for it; not among `prompt_tokens`."""
    truncated: int = Field(default=0, ge=0)
    """Texts, pairs and states that were cut."""


class Timing(Message):
    """Where the time went, in milliseconds on the worker's monotonic clock."""

    wait_ms: float = Field(default=0.0, ge=0.0)
    """From pick-up by the worker to the first forward pass."""
    tokenize_ms: float = Field(default=0.0, ge=0.0)
    """Turning its texts into tokens, checks included."""
    device_ms: float = Field(default=0.0, ge=0.0)
    """Of one-shot work: the batches that its items ran in, together."""
    batches: int = Field(default=0, ge=0)
    """Of one-shot work: how many these were; fewer than its items need if others had asked the same."""
    prefill_ms: float = Field(default=0.0, ge=0.0)
    """From the first forward pass to the first token."""
    decode_ms: float = Field(default=0.0, ge=0.0)
    """From the first token to the last."""


class Batch(Message):
    """The batch that a request ran in, of several the last: a micro-batch, or the rows that it joined."""

    id: Name
    """The worker, and a number of its own: no other batch of the fleet has this one."""
    size: int = Field(default=0, ge=0)
    """Its items; or the rows that ran once it had joined."""
    padded_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Which share of its tokens only filled rows up to one length; of running rows 0."""
    reason: Annotated[str, Field(max_length=32)] = ""
    """Why it was launched just then: full, delay, waited, ratio, deadline or drain."""


MAX_DETAILS_TOLD = 16
MAX_DETAIL_CHARS = 32 * 1024
"""Of one detail of an error, which somebody's handler may have raised: it may quote a whole input."""
MAX_DETAIL_TEXTS = 1000


def _encodable(text: str) -> str:
    # Names of files may hold lone surrogates, and an error must not fail over them.
    return text.encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        left, texts = MAX_DETAIL_CHARS, []
        for item in islice(value, MAX_DETAIL_TEXTS):
            texts.append(_encodable(str(item)[:left]))
            left -= len(texts[-1])
            if not left:
                break
        return texts
    return _encodable(str(value)[:MAX_DETAIL_CHARS])


_Detail = Annotated[
    bool
    | int
    | float
    | Text
    | Annotated[tuple[Text, ...], SEQUENCE, Field(max_length=MAX_DETAIL_TEXTS)]
    | None,
    Said("a plain value is wanted: a text, a number, true, false, null, or a list of texts"),
]


class Failure(Message):
    """An error on the wire; `errors.from_wire` makes the exception of it."""

    code: Annotated[str, Field(max_length=64)]
    message: Annotated[str, Field(max_length=4000)]
    details: Annotated[dict[Name, _Detail], Field(max_length=64)] = Field(default_factory=dict)

    @classmethod
    def of(cls, error: errors.StreamfleetError) -> Failure:
        """What an error is on the wire: of long words and lists the beginning, so that it fits any result."""
        details = islice(error.details.items(), MAX_DETAILS_TOLD)
        return cls(
            code=error.code,
            message=_encodable(str(error)[:4000]),
            details={_encodable(name[:200]): _plain(value) for name, value in details},
        )

    def error(self) -> errors.StreamfleetError:
        return errors.from_wire(self.code, self.message, self.details)


class End(Message):
    """The last event of a request, and its stored result."""

    type: Literal["end"] = "end"
    state: EndState
    choices: Annotated[tuple[Choice, ...], SEQUENCE] = ()
    answers: Annotated[tuple[Decision, ...], SEQUENCE] = ()
    """Those to the questions of a `DecideRequest`, in their order."""
    embeddings: Annotated[tuple[Embedding, ...], SEQUENCE] = ()
    """Of an `EmbedRequest`, in the order of its texts."""
    classifications: Annotated[tuple[Classification, ...], SEQUENCE] = ()
    """Of a `ClassifyRequest`, in the order of its texts."""
    ranking: Annotated[tuple[Rank, ...], SEQUENCE] = ()
    """Of a `RerankRequest`, the best document first; of equals the one given first."""
    outputs: Annotated[tuple[Json, ...], SEQUENCE] = ()
    """Of a `CallRequest`: the handler's output, or every part of it."""
    prefill: Prefill | None = None
    """The prompt's tokens, when asked for without streaming; a stream carries them as an event."""
    error: Failure | None = None
    usage: Usage = Usage()
    seed: int | None = None
    timing: Timing = Timing()
    batch: Batch | None = None
    """None if it needed none, or none came, or the worker is of a version that does not say."""
    memory: Annotated[dict[Name, int], Field(max_length=64)] = Field(default_factory=dict)
    """Bytes that the worker's engine took then, by use: weights, buffers, caches, and the peak."""
    model: Name = ""
    revision: Name = ""
    worker: Name = ""
    exact: Name = ""
    """The class of workers on which this request gets these very bits, alone and in any company; "" when
    that cannot be promised."""
    attempt: int = Field(default=0, ge=0)
    """How many workers started the request, this one included; 0 if none did."""
    of: int = Field(default=0, ge=0)
    """The epoch whose deltas make the text; 0 if there is none."""
    last_seq: int = Field(default=0, ge=0)
    """The number of the last event of that epoch: with it a reader can tell that nothing is missing."""
    queued_at_ms: int = 0
    started_at_ms: int = 0
    """0 if no worker ever started it."""
    ended_at_ms: int = 0

    @property
    def text(self) -> str:
        """The text of the first choice; "" if there is none."""
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids if self.choices else ()

    @property
    def output(self) -> Any:
        """A handler's output, of one that comes in parts the last; None if there is none."""
        return self.outputs[-1] if self.outputs else None

    @property
    def finish_reason(self) -> FinishReason:
        if self.choices:
            return self.choices[0].finish_reason
        if self.state == "done":
            return "stop"  # no text: what was asked is answered
        if self.state == "cancelled" or self.state == "expired":
            return self.state
        return "error"


Event = Annotated[Start | Prefill | Delta | Parts | Restart | End, Field(discriminator="type")]
