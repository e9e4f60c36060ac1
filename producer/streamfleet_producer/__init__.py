"""What a service imports to push requests and read tokens.

::

    async with Client("redis://localhost:6379/0", queue="smollm2") as fleet:
        async with fleet.stream(GenerateRequest(prompt="The capital of France is", max_tokens=32)) as tokens:
            async for delta in tokens:
                print(delta.text, end="")
        print(tokens.result.finish_reason, tokens.result.usage)

`streamfleet_producer.blocking` has the same for programs without an event loop.
"""

from streamfleet_common.cards import Card, Limits
from streamfleet_common.decisions import DecideRequest, Decision, Question
from streamfleet_common.depth import Depth
from streamfleet_common.errors import (
    BrokerUnavailable,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestNotFound,
    StreamfleetError,
    TooLong,
    Undecodable,
    Unsupported,
)
from streamfleet_common.one_shot import (
    CallRequest,
    Classification,
    ClassifyRequest,
    Embedding,
    EmbedRequest,
    HandlerCard,
    Label,
    Rank,
    RerankRequest,
)
from streamfleet_common.schemas import (
    Batch,
    ChatMessage,
    Choice,
    Delta,
    End,
    GenerateRequest,
    Guide,
    Parts,
    Prefill,
    Restart,
    Retry,
    Sampling,
    Start,
    Timing,
    Tool,
    ToolCall,
    Usage,
)
from streamfleet_producer.client import Client
from streamfleet_producer.hub import Hub
from streamfleet_producer.ticket import Status, Ticket
from streamfleet_producer.token_counter import TokenCounter
from streamfleet_producer.token_stream import PartStream, TokenStream

__all__ = [
    "Batch",
    "BrokerUnavailable",
    "CallRequest",
    "Cancelled",
    "Card",
    "ChatMessage",
    "Choice",
    "Classification",
    "ClassifyRequest",
    "Client",
    "Conflict",
    "DeadlineExceeded",
    "DecideRequest",
    "Decision",
    "Delta",
    "Depth",
    "EmbedRequest",
    "Embedding",
    "End",
    "GenerateRequest",
    "GenerationFailed",
    "Guide",
    "HandlerCard",
    "Hub",
    "IncompleteGeneration",
    "InvalidRequest",
    "Label",
    "Limits",
    "ModelNotFound",
    "PartStream",
    "Parts",
    "Prefill",
    "Question",
    "QueueFull",
    "Rank",
    "RequestNotFound",
    "RerankRequest",
    "Restart",
    "Retry",
    "Sampling",
    "Start",
    "Status",
    "StreamfleetError",
    "Ticket",
    "Timing",
    "TokenCounter",
    "TokenStream",
    "TooLong",
    "Tool",
    "ToolCall",
    "Undecodable",
    "Unsupported",
    "Usage",
]
