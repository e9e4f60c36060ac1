"""What text-generation-inference's clients send, and what they are answered with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from streamfleet_common.message import SEQUENCE, LongText, Text
from streamfleet_common.schemas import MAX_TOKENS

DEFAULT_MAX_NEW_TOKENS = 100
MAX_STOP_SEQUENCES = 8
MAX_BEST_OF = 64
MAX_TOP_N_TOKENS = 20

TgiFinishReason = Literal["length", "eos_token", "stop_sequence"]


class _Given(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class _Answered(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# --- requests


class TgiSchema(_Given):
    """A JSON schema under a name."""

    name: Annotated[str, Field(max_length=256)] | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class TgiJsonGrammar(_Given):
    """The answer is a JSON document that fits the schema, a map or its text."""

    type: Literal["json"]
    value: dict[str, Any] | Annotated[str, Field(max_length=64 * 1024)]


class TgiRegexGrammar(_Given):
    """The whole answer matches."""

    type: Literal["regex"]
    value: Annotated[str, Field(min_length=1, max_length=4096)]


class TgiJsonSchemaGrammar(_Given):
    """As `json`, with the schema one level deeper."""

    type: Literal["json_schema"]
    value: TgiSchema


class TgiParameters(_Given):
    """How to generate. Greedy, unless `do_sample` is set or a parameter of sampling is given.

    Those are `temperature`, `top_k`, `top_p` and `typical_p`.
    """

    best_of: Annotated[int, Field(ge=1, le=MAX_BEST_OF)] | None = None
    """Generate so many answers and give the likeliest. Only where tokens are drawn."""
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    top_k: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    top_p: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    typical_p: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    do_sample: bool = False
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """100 unless said."""
    return_full_text: bool | None = None
    """Begin the answer with the prompt. Unless said, `POST /` does and the other routes do not."""
    stop: (
        Annotated[
            tuple[Annotated[Text, Field(min_length=1, max_length=64)], ...],
            Field(strict=False, max_length=MAX_STOP_SEQUENCES),
        ]
        | None
    ) = None
    truncate: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Keep so many tokens of the prompt's end."""
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    """Report the prompt's tokens."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=MAX_TOP_N_TOKENS)] | None = None
    """Report so many of the likeliest tokens at each place."""
    grammar: (
        Annotated[
            TgiJsonGrammar | TgiRegexGrammar | TgiJsonSchemaGrammar,
            Field(discriminator="type"),
        ]
        | None
    ) = None
    adapter_id: Annotated[str, Field(max_length=256)] | None = None


class TgiGenerateBody(_Given):
    """Text to be continued."""

    inputs: LongText
    parameters: TgiParameters | None = None
    stream: bool = False
    """Only `POST /` looks at it."""
    options: dict[str, Any] | None = None
    """Clients of a hosted service send it; it has no effect."""


# --- answers


class TgiPrefillToken(_Answered):
    """A token of the prompt; the first one has no log-probability."""

    id: int
    text: str
    logprob: float | None


class TgiToken(_Answered):
    """A token of the answer. The texts of those that are not special, joined, are the text."""

    id: int
    text: str
    logprob: float | None
    special: bool


class TgiSequence(_Answered):
    """One of the answers of which the best was given."""

    generated_text: str
    finish_reason: TgiFinishReason
    generated_tokens: int
    seed: int | None
    prefill: Annotated[tuple[TgiPrefillToken, ...], SEQUENCE] = ()
    tokens: Annotated[tuple[TgiToken, ...], SEQUENCE] = ()
    top_tokens: Annotated[tuple[tuple[TgiToken, ...], ...], SEQUENCE] | None = None


class TgiDetails(_Answered):
    """What is told with `details`."""

    finish_reason: TgiFinishReason
    generated_tokens: int
    seed: int | None
    prefill: Annotated[tuple[TgiPrefillToken, ...], SEQUENCE] = ()
    tokens: Annotated[tuple[TgiToken, ...], SEQUENCE] = ()
    top_tokens: Annotated[tuple[tuple[TgiToken, ...], ...], SEQUENCE] | None = None
    best_of_sequences: Annotated[tuple[TgiSequence, ...], SEQUENCE] | None = None


class TgiGenerated(_Answered):
    """The answer of `POST /generate`; `POST /` gives it in a list."""

    generated_text: str
    details: TgiDetails | None = None


class TgiGeneratedList(RootModel[Annotated[tuple[TgiGenerated, ...], SEQUENCE]]):
    """The answer of `POST /`."""


class TgiInfo(_Answered):
    """What is served; of several workers what the most generous one takes."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_input_length: int
    """The older name of the same."""
    max_total_tokens: int
    max_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
