"""The worker's settings, read once at its start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from streamfleet_common.depth import MAX_QUEUE_DEPTH
from streamfleet_common.errors import StreamfleetError
from streamfleet_common.keys import MAX_SUB_LANES
from streamfleet_common.settings import FleetSettings, read

WRONG_SETTINGS = 2
"""The exit status that says so: to try again with the same ones is in vain."""


class WorkerSettings(FleetSettings):
    """How one worker serves one queue. Lengths in tokens."""

    engine: Literal["auto", "generation", "micro_batch", "scripted"] = "auto"
    """`generation` continues texts token by token, `micro_batch` does what is done in one go: vectors,
    labels, ranks. `auto` goes by the model. `scripted` answers without a model, for trying out a service and
    measuring the fleet itself."""
    handler: str | None = None
    """Serve a function of one's own, `module:function`, instead of a model."""
    model: str = "smollm2"
    """An alias, a folder, a GGUF file, or a hub reference `org/name[@revision]`."""
    models_file: Path | None = None
    """A TOML file of further aliases."""
    device: str = "auto"
    """`auto`, `cpu`, `cpu:2` (its threads), `cuda`, `cuda:1`, `mps`."""
    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    threads: int = Field(1, ge=1, le=1024)
    """CPU threads of the model. More workers with one thread serve more than one worker with many."""
    preload: bool = True
    """Run every shape of micro-batch once before the worker is ready, so that no request waits for it."""

    max_batch_size: int | None = Field(None, ge=1, le=4096)
    """Requests, or items of one-shot work, in one batch. If not said 8 for generation and 32 for
    micro-batches; a handler says its own."""
    max_batch_tokens: int = Field(16_384, ge=1, le=1_048_576)
    """Tokens in one micro-batch, those included that fill its rows up."""
    max_delay_ms: float | None = Field(None, ge=0.0, le=60_000.0)
    """How long the oldest request may wait, since its acceptance, for a batch to fill. If not said 20; a
    handler says its own."""
    max_seq_len: int = Field(4096, ge=2, le=1_048_576)
    """Prompt and answer together; never more than the model was made for."""
    max_waiting_tokens: int = Field(16, ge=1, le=100_000)
    """Steps of the running batch after which newcomers join it, however few."""
    max_waiting_ms: float = Field(1000.0, ge=0.0, le=600_000.0)
    """Age, since its acceptance, at which a newcomer joins, whatever else."""
    max_prefill_tokens: int = Field(2048, ge=32, le=1_048_576)
    """Prompt tokens computed in one step while nothing is decoded."""
    prefill_chunk: int = Field(512, ge=32, le=1_048_576)
    """Prompt tokens computed in one step beside rows that decode: what a long prompt may hold them up."""
    exact: bool = True
    """Give a request the same bits alone, in any company and at each further try, where the machine can: rows
    are padded to what its kernels compute alike. Answers say whether it holds."""
    cache_mib: int | None = Field(None, ge=1, le=16_777_216)
    """Memory for the keys and values of what runs; half of what is free, and no more than the batch can fill,
    if none is said."""
    prefix_cache_mib: int = Field(256, ge=0, le=16_777_216)
    """Memory for the keys and values of prompts' beginnings that may come again; 0 keeps none."""
    tokenization_cache_mib: int = Field(32, ge=0, le=1_048_576)
    """Memory for the tokens of texts that may come again; 0 keeps none."""
    answer_cache_mib: int = Field(0, ge=0, le=1_048_576)
    """Memory for answers of one-shot work that may be asked for again; 0 keeps none."""
    answer_cache_ttl_s: float = Field(3600.0, gt=0.0, le=31_536_000.0)
    """How long these are kept."""
    cuda_graphs: bool = False
    """On an NVIDIA GPU, replay recorded decode steps instead of launching each kernel; takes more memory."""
    max_queue_depth: int = Field(MAX_QUEUE_DEPTH, ge=1, le=10_000_000)
    """Accepted and unfinished requests the queue holds before it refuses more."""

    max_queue_tokens: int = Field(0, ge=0, le=10**12)
    """Tokens of accepted, unfinished requests, prompt and answer, at which more are refused; 0: no limit."""

    sub_lanes: int = Field(1, ge=1, le=MAX_SUB_LANES)
    """Into how many each lane is split, by tenant. They are read in turn, so that who floods one holds up
    nobody but those who share it. The same for all workers of a queue."""
    lease_s: float = Field(15.0, ge=0.2, le=3600.0)
    """A worker that is silent for so long has lost its requests. The same for all workers of a queue."""
    step_limit_s: float = Field(300.0, gt=0.0, le=86_400.0)
    """No single step of the engine takes so long, the worst prefill included; a worker in a longer one ends
    itself, and others take its work over."""
    dead_letter_payload: bool = False
    """Keep the requests themselves in the dead letters, prompts and all, so that they can be replayed."""
    drain_timeout_s: float = Field(30.0, ge=0.0, le=86_400.0)
    """How long a worker that was told to stop goes on with what it runs; the rest is handed back then."""
    workers: int = Field(0, ge=0, le=256)
    """Worker processes that a supervisor keeps running here; 0: this process is the worker, alone."""
    max_crashes: int = Field(5, ge=1, le=1000)
    """Crashes in a row, for each of its workers, after which a supervisor ends itself; one answered request
    begins a new row. Those of a request that is found to kill its workers count as one."""
    http_host: str = "127.0.0.1"
    http_port: int | None = Field(None, ge=0, le=65_535)
    """Port of /healthz, /readyz and /metrics; 0 picks a free one, none serves nothing. A supervisor answers
    there for all of its workers."""
    log_format: Literal["json", "console"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def chosen() -> WorkerSettings | None:
    """The settings in the environment, or None once standard error has been told what is wrong with them."""
    try:
        return read(WorkerSettings)
    except StreamfleetError as error:
        sys.stderr.write(f"{error}\n")
        return None
