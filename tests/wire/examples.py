"""A message of each kind as it is on the wire, with every field that it may have."""

from __future__ import annotations

import struct
from typing import Any

RID = "00" + "ab" * 16
SAMPLING = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.25,
    "typical_p": 0.75,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": [[7, -100.0], [0, 0.5]],
    "bad_words": ["x"],
    "seed": 2**63 - 1,
}
TOOL = {"name": "weather", "description": "of a place", "parameters": '{"type": "object"}'}
CALL = {"id": "c1", "name": "weather", "arguments": '{"place": "here"}'}
GENERATE = {
    "kind": "generate",
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?", "name": "anna"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "no", "tool_call_id": "c1"},
    ],
    "tools": [TOOL],
    "max_tokens": "fit",
    "min_tokens": 0,
    "n": 2,
    "truncate": 100,
    "truncate_side": "right",
    "sampling": SAMPLING,
    "guide": {"choice": ["yes", "no"]},
    "stop": ["."],
    "include_stop": True,
    "stop_token_ids": [3],
    "ignore_eos": False,
    "logprobs": True,
    "top_logprobs": 2,
    "prompt_logprobs": True,
    "echo": True,
    "skip_special_tokens": False,
}
QUESTION = {"id": "q", "type": "choice", "criteria": "Which?", "options": ["a", "b"]}
REQUESTS: dict[str, dict[str, Any]] = {
    "generate": GENERATE,
    "decide": {
        "kind": "decide",
        "model": "m",
        "state": "text",
        "questions": [QUESTION, {"id": "y", "type": "yes_no", "criteria": "Is it?"}],
        "temperatures": [[2, 0.5]],
        "truncate": True,
    },
    "embed": {
        "kind": "embed",
        "model": "m",
        "texts": ["a", "b"],
        "pooling": "mean",
        "normalize": True,
        "dimensions": 64,
        "truncate": True,
        "truncate_side": "left",
    },
    "classify": {
        "kind": "classify",
        "model": "m",
        "texts": ["a"],
        "pairs": ["b"],
        "multi_label": False,
        "top_k": 2,
        "truncate": True,
        "truncate_side": "left",
    },
    "rerank": {
        "kind": "rerank",
        "model": "m",
        "query": "q",
        "documents": ["a", "b"],
        "top_n": 1,
        "raw_scores": True,
        "truncate": True,
        "truncate_side": "left",
    },
    "call": {"kind": "call", "handler": "h", "input": {"a": [1, 2.5, None, True, "x", {}]}},
}
ENVELOPE = {
    "v": 1,
    "rid": RID,
    "tenant": "a.b",
    "lane": "bulk",
    "stream": True,
    "deadline_ms": 1,
    "on_restart": "fail",
    "retry": {"attempts": 3, "backoff_ms": 100},
    "idempotency_key": "k",
    "result_ttl_ms": 1000,
    "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
}
PREFILL = {
    "type": "prefill",
    "token_ids": [1, 2],
    "texts": ["a", "b"],
    "logprobs": [None, -0.5],
    "top_logprobs": [[], [[2, -0.5]]],
}
CHOICE = {
    "index": 1,
    "text": "ab",
    "token_ids": [1, 2],
    "logprobs": [-0.5, None],
    "top_logprobs": [[[1, -0.5]], []],
    "finish_reason": "eos",
    "last_token_id": 2,
    "seed": 7,
}
END = {
    "type": "end",
    "state": "done",
    "choices": [CHOICE],
    "answers": [
        {"id": "q", "option": "a", "probabilities": {"a": 0.75, "b": 0.25}, "scores": {"a": 1.0, "b": -1.0}}
    ],
    "embeddings": [{"data": struct.pack("<2f", 1.0, -0.5)}],
    "classifications": [{"labels": [{"label": "good", "score": 0.5}]}],
    "ranking": [{"index": 1, "score": 0.5}],
    "outputs": [{"a": 1}, None],
    "prefill": PREFILL,
    "error": {"code": "c", "message": "m", "details": {"limit": 5, "problems": ["a"]}},
    "usage": {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "cut_tokens": 5,
        "truncated": 1,
    },
    "seed": 7,
    "timing": {
        "wait_ms": 0.5,
        "tokenize_ms": 0.5,
        "device_ms": 0.5,
        "batches": 1,
        "prefill_ms": 0.5,
        "decode_ms": 0.5,
    },
    "batch": {"id": "w/1", "size": 8, "padded_ratio": 0.25, "reason": "full"},
    "memory": {"weights": 5},
    "model": "m",
    "revision": "r",
    "worker": "w",
    "exact": "e",
    "attempt": 2,
    "of": 3,
    "last_seq": 4,
    "queued_at_ms": 1,
    "started_at_ms": 2,
    "ended_at_ms": 3,
}
EVENTS: dict[str, dict[str, Any]] = {
    "start": {
        "v": 1,
        "type": "start",
        "worker": "w",
        "model": "m",
        "revision": "r",
        "queued_at_ms": 1,
        "started_at_ms": 2,
        "exact": "e",
    },
    "prefill": {"v": 1, **PREFILL},
    "delta": {
        "v": 1,
        "type": "delta",
        "index": 1,
        "token_ids": [1],
        "texts": ["a"],
        "logprobs": [-0.5],
        "top_logprobs": [[[1, -0.5]]],
    },
    "parts": {"v": 1, "type": "parts", "values": [1, {"a": None}]},
    "restart": {"v": 1, "type": "restart", "reason": "the worker was lost"},
    "end": {"v": 1, **END},
}
CARD = {
    "v": 1,
    "worker": "w",
    "queue": "q",
    "model": "m",
    "revision": "r",
    "tasks": ["generate", "call"],
    "handler": {"input_schema": "{}", "output_schema": "{}", "streams": True},
    "layout": {"text": 1, "pair": 2, "state": 3, "question": 4, "option": 5, "option_prefix": " "},
    "device": "cpu",
    "precision": "float32",
    "limits": {
        "max_batch_size": 1,
        "max_seq_len": 2,
        "max_queue_depth": 3,
        "max_queue_tokens": 4,
        "max_request_bytes": 5,
        "vocab_size": 6,
    },
    "capacity": 7,
    "state": "draining",
}
MESSAGES: dict[str, dict[str, Any]] = {
    **{f"envelope of {kind}": {**ENVELOPE, "request": request} for kind, request in REQUESTS.items()},
    **EVENTS,
    "card": CARD,
}
"""By the name of what it is; of an envelope also of what it holds."""
