"""Which series a worker shows, whatever happens. Names end as vLLM's do where the meaning is the same.

All label values are ours or the operator's. What a client sends, and what another version calls otherwise,
must never make a new series.
"""

from __future__ import annotations

FINISH_REASONS = ("eos", "stop", "length")
ERROR_TYPES = (
    "cancelled",
    "deadline_exceeded",
    "generation_failed",
    "invalid_request",
    "model_not_found",
    "too_long",
    "undecodable",
    "unsupported",
)
SWEPT = ("expired", "requeued", "failed", "dead", "stray")
OTHER = "other"
"""Of a finished reason or an error type that is none of these."""

COUNTERS = {
    "prompt_tokens": "Prompt tokens computed.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked for in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "padded_tokens": "Tokens of micro-batches, those that fill rows up included.",
    "truncated": "Texts, pairs and states that were cut, as was asked.",
    "truncated_tokens": "Tokens that were cut from them.",
    "redeliveries": "Requests that another worker had started before.",
    "leases_lost": "Requests taken from a worker that ran them, and had not renewed their leases.",
    "fenced_writes": "Writes refused: no longer ours.",
    "dead_letters": "Entries that no record knows, put aside.",
    "broker_reconnects": "How often Redis came back after a failure.",
}
ENGINE_COUNTERS = {
    "tokenization_cache_queries": "Texts that were looked for in the tokenization cache.",
    "tokenization_cache_hits": "Those of them that were there.",
    "answer_cache_queries": "Items that were looked for in the answer cache.",
    "answer_cache_hits": "Those of them that were there.",
    "coalesced_items": "Items that shared the computation of an equal one.",
}
"""The engine counts these itself."""

# From a millisecond to the hours that a bulk queue may hold a request.
_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_STEPS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_LENGTHS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
_SHARES = (0, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "batch_size": ("Rows that decode in one pass, or items of a micro-batch.", _SIZES),
    "batch_tokens": (
        "Tokens a batch begins with: a micro-batch's and its padding; newcomers', and one a running row.",
        _LENGTHS,
    ),
    "batch_padding_ratio": ("Share of a batch's tokens that only fills rows up.", _SHARES),
    "engine_step_seconds": ("Time of one engine step.", _STEPS),
    "device_seconds": ("Computing time of one micro-batch.", _STEPS),
    "tokenize_seconds": ("Turning a request's texts into tokens.", _STEPS),
    "request_queue_time_seconds": ("From acceptance to a worker, on the server's clock.", _WAITS),
    "time_to_first_token_seconds": ("From acceptance to the first token.", _WAITS),
    "inter_token_latency_seconds": (
        "Between the steps of two tokens of one answer that follow each other; the first token is none.",
        _STEPS,
    ),
    "request_prefill_time_seconds": ("From the first forward pass to the first token.", _WAITS),
    "request_decode_time_seconds": ("From the first token to the last.", _WAITS),
    "request_time_per_output_token_seconds": ("Decode time a token, after the first.", _STEPS),
    "e2e_request_latency_seconds": ("From acceptance to the end.", _WAITS),
    "request_prompt_tokens": ("Prompt tokens a request.", _LENGTHS),
    "request_generation_tokens": ("Generated tokens a request.", _LENGTHS),
}
"""By name, with the upper bounds of their buckets."""
MILLISECONDS = {
    "tokenize_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_time_per_output_token_seconds",
}
"""What answers themselves tell so, and is counted so."""
