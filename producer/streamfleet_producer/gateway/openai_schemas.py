"""Bodies of OpenAI's requests, as its clients and those of vLLM and TGI send them. No HTTP here.

A field that is null is as good as not given, as OpenAI has it. Fields that can change no answer here are
taken and ignored (`IGNORED` names them); others that are unknown are refused, since they would be in vain.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from streamfleet_common.message import MAX_PROMPT_CHARS, LongText, Name, Said, Text, TokenId
from streamfleet_common.schemas import MAX_TOKENS

MAX_PROMPTS = 128
"""Of one request."""
MAX_INPUTS = 2048
"""Texts of one request for embeddings."""
MAX_STOPS = 8
MAX_BIASES = 1000
IGNORED = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)

_STRING = f"a string of at most {MAX_PROMPT_CHARS} characters"
_Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS)]
_Stop = Annotated[Text, Field(min_length=1, max_length=64)]
_Stops = Annotated[
    _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)],
    Said(f"Input should be a string of 1 to 64 characters, or a list of at most {MAX_STOPS} of them"),
]
_Prompts = Annotated[
    LongText
    | Annotated[list[LongText], Field(min_length=1, max_length=MAX_PROMPTS)]
    | _Tokens
    | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_PROMPTS)],
    Said(
        f"Input should be {_STRING}, a list of 1 to {MAX_TOKENS} token ids, or a list of 1 to {MAX_PROMPTS} "
        "such strings or lists"
    ),
]
_Bias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-1000.0, le=1000.0)]],
    Field(max_length=MAX_BIASES),
]
_Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
_Object = dict[str, Any]


class Body(BaseModel):
    """The root of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    """What else a stream tells."""

    include_usage: bool | None = None
    """Tell the usage in a last chunk without choices."""
    include_obfuscation: bool | None = None
    """Ignored: there is no padding here."""


class Structure(Body):
    """A form that the answer must have, in the words of vLLM; exactly one of these."""

    json_: _Object | Text | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None


class GenerationBody(Body):
    """What completions and chats have in common."""

    model: Name | None = None
    """A model, or a queue; none is the only one that there is."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    """1 unless given; 0 is greedy."""
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] | None = None
    logit_bias: _Bias | None = None
    """Token ids, as text, each with what is added to its logit."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stops | None = None

    # Further ones, as vLLM and TGI have them.
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    """-1 and 0 draw from all tokens."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: _Count | None = None
    """Keep so many tokens of the end of the prompt."""
    bad_words: Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    structured_outputs: Structure | None = None
    guided_json: _Object | Text | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None

    # Taken, and of no effect.
    user: Text | None = None
    metadata: _Object | None = None
    store: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: _Object | None = None
    prompt_cache_retention: Text | None = None
    prediction: _Object | None = None

    @model_validator(mode="after")
    def _streams(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream to true")
        return self


# --- completions


class CompletionBody(GenerationBody):
    """Of `POST /v1/completions`."""

    prompt: _Prompts
    suffix: Text | None = None
    max_tokens: _Count | None = None
    """16 unless given."""
    best_of: Annotated[int, Field(ge=1, le=64)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


# --- chats


class Part(Body):
    """A part of what was said."""

    model_config = ConfigDict(extra="allow")

    type: Text
    text: LongText | None = None
    refusal: LongText | None = None


_Content = Annotated[
    LongText | Annotated[list[Part], Field(max_length=1000)],
    Said(
        f'Input should be {_STRING}, or a list of parts with such texts, as {{"type": "text", "text": "…"}}'
    ),
]


class CalledFunction(Body):
    """The function that a call is of."""

    name: Text
    arguments: Text = ""


class Call(Body):
    """A call that the model asked for in an earlier turn."""

    id: Name = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Turn(Body):
    """A turn of a chat."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: _Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[Call], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None
    refusal: LongText | None = None
    audio: Any = None
    function_call: Any = None
    annotations: Any = None
    """Ignored."""
    reasoning_content: Any = None
    """Ignored: no template shows the model what it thought before."""
    reasoning: Any = None


class Function(Body):
    """What the model may call."""

    name: Text
    description: Text | None = None
    parameters: _Object | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """A tool; no other kinds are known here."""

    type: Text
    function: Function | None = None
    custom: Any = None


class FunctionName(Body):
    """Which function."""

    name: Text


class ToolChoice(Body):
    """The tool that the model has to call."""

    type: Text
    function: FunctionName | None = None
    custom: Any = None
    allowed_tools: Any = None


class NamedSchema(Body):
    """A JSON schema with a name that nothing depends on."""

    name: Text | None = None
    description: Text | None = None
    schema_: _Object | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class ChatBody(GenerationBody):
    """Of `POST /v1/chat/completions`."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=1000)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    """What the prompt leaves of the model's length unless given."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | ToolChoice,
            Said('Input should be "none", "auto", "required", or name a function'),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None

    # Refused unless they ask for what happens anyway.
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: list[Text] | None = None
    moderation: Any = None
    reasoning_effort: Text | None = None
    verbosity: Text | None = None
    web_search_options: Any = None


# --- embeddings


class EmbeddingBody(Body):
    """Of `POST /v1/embeddings`."""

    model: Name | None = None
    input: Annotated[
        LongText
        | Annotated[list[LongText], Field(min_length=1, max_length=MAX_INPUTS)]
        | _Tokens
        | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_INPUTS)],
        Said(f"Input should be {_STRING}, or a list of 1 to {MAX_INPUTS} of them"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = None
    user: Text | None = None
    """Ignored."""
    truncate: bool | None = None
    """Cut texts that are too long for the model, instead of refusing them."""
