"""*Worker*: one process, or those of one host. Its steps, its batches, its memory, its ties to Redis.

Gauges are those of one worker. Counters and histograms of workers that one supervisor keeps are told
together, so their panels show a host's workers of a queue; of a worker that runs alone, they show that one.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from panels import (
    HOST,
    QUEUE,
    THIRD,
    WORKER,
    board,
    heat,
    lines,
    mean,
    number,
    quantiles,
    query,
    rate,
    share,
    variable,
)

SLOT = "queue, instance, worker"
PLACE = "{{instance}} {{worker}}"


def worker() -> dashboard.Dashboard:
    """The dashboard."""
    begun = (
        board(
            "worker", "The workers of one host: steps, batches, memory, and their ties to Redis.", many=True
        )
        .with_variable(
            variable(
                "instance",
                "Host",
                f"label_values(streamfleet_seconds_since_last_poll{{{QUEUE}}}, instance)",
                many=True,
            )
        )
        .with_variable(
            variable(
                "worker",
                "Worker",
                f"label_values(streamfleet_seconds_since_last_poll{{{HOST}}}, worker)",
                many=True,
            )
        )
    )
    return _ties(_memory(_batches(_steps(_now(begun)))))


def _gauge(metric: str, by: str = SLOT) -> str:
    return f"max by ({by}) (streamfleet_{metric}{{{WORKER}}})"


def _now(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("Now"))
        .with_panel(
            number(
                "What it is",
                "Model, revision, device and precision.",
                "none",
                _gauge("build_info", "model, revision, device, precision"),
                "{{model}} {{revision}} {{device}} {{precision}}",
                name_only=True,
                width=THIRD,
            )
        )
        .with_panel(
            number(
                "Up for",
                "Time since the process started.",
                "s",
                f"time() - {_gauge('process_start_time_seconds')}",
                PLACE,
            )
        )
        .with_panel(
            number(
                "Running",
                "Rows of the batch: answers that run.",
                "short",
                _gauge("num_requests_running"),
                PLACE,
            )
        )
        .with_panel(
            number(
                "Waiting",
                "Answers that are pulled, but not yet in the batch.",
                "short",
                _gauge("num_requests_waiting"),
                PLACE,
            )
        )
        .with_panel(
            number(
                "Last look for work",
                "Age of the last completed look for work; over ten seconds the worker is not ready.",
                "s",
                _gauge("seconds_since_last_poll"),
                PLACE,
            )
        )
    )


def _steps(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("Steps"))
        .with_panel(
            lines(
                "Time of a step",
                "One step of the engine: a decoded token for each row, or a micro-batch.",
                "s",
                *quantiles("engine_step_seconds", "{{queue}}", labels=HOST),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Computing and tokenising",
                "Mean computing time of a micro-batch, and of turning a request's texts into tokens.",
                "s",
                query(mean("device_seconds", labels=HOST), "{{queue}} micro-batch"),
                query(mean("tokenize_seconds", labels=HOST), "{{queue}} tokenising"),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Rows",
                "Answers that run, and those that are pulled and wait.",
                "short",
                query(_gauge("num_requests_running"), f"{PLACE} running"),
                query(_gauge("num_requests_waiting"), f"{PLACE} waiting"),
                width=THIRD,
            )
        )
    )


def _batches(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("Batches"))
        .with_panel(
            heat(
                "Batch size",
                "Rows that decode in one pass, or items of a micro-batch.",
                "short",
                "batch_size",
                labels=HOST,
                width=THIRD,
            )
        )
        .with_panel(
            heat(
                "Batch tokens",
                "Tokens of one pass or micro-batch.",
                "short",
                "batch_tokens",
                labels=HOST,
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Padding",
                "Mean share of a batch that only fills its rows up: computed for nothing.",
                "percentunit",
                query(mean("batch_padding_ratio", labels=HOST), "{{queue}}"),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Why batches start",
                "Batches by what made them start: full, or waited for as long as they may.",
                "ops",
                query(rate("batch_launch_total", "reason", HOST), "{{reason}}"),
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Tokens",
                "Prompt tokens computed and tokens generated, a second.",
                "short",
                query(rate("prompt_tokens_total", labels=HOST), "{{queue}} prompt"),
                query(rate("generation_tokens_total", labels=HOST), "{{queue}} generated"),
            )
        )
    )


def _memory(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("Memory and caches"))
        .with_panel(
            lines(
                "Keys and values",
                "Share of the cache of keys and values that running answers have reserved.",
                "percentunit",
                query(_gauge("kv_cache_usage_ratio"), PLACE),
                most=1,
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Memory",
                "Memory that the engine takes, by kind.",
                "bytes",
                query(_gauge("model_memory_bytes", f"{SLOT}, kind"), f"{PLACE} {{{{kind}}}}"),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Cache hits",
                "Share of prompt tokens, texts and items that were found and not computed again.",
                "percentunit",
                query(
                    share("prefix_cache_hits_total", "prefix_cache_queries_total", labels=HOST),
                    "{{queue}} prefixes",
                ),
                query(
                    share("tokenization_cache_hits_total", "tokenization_cache_queries_total", labels=HOST),
                    "{{queue}} tokenised texts",
                ),
                query(
                    share("answer_cache_hits_total", "answer_cache_queries_total", labels=HOST),
                    "{{queue}} answers",
                ),
                most=1,
                width=THIRD,
            )
        )
    )


def _ties(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("Ties to Redis"))
        .with_panel(
            lines(
                "Last look for work",
                "Age of the last completed look for work.",
                "s",
                query(_gauge("seconds_since_last_poll"), PLACE),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Publisher lag",
                "For how long the oldest event has waited that is brought forth and not in Redis yet.",
                "s",
                query(_gauge("publisher_lag_seconds"), PLACE),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Work lost",
                "A minute: leases lost, writes refused, requests somebody had started before, reconnections.",
                "short",
                query(f"60 * {rate('leases_lost_total', labels=HOST)}", "{{queue}} leases lost"),
                query(f"60 * {rate('fenced_writes_total', labels=HOST)}", "{{queue}} fenced"),
                query(f"60 * {rate('redeliveries_total', labels=HOST)}", "{{queue}} redelivered"),
                query(f"60 * {rate('broker_reconnects_total', labels=HOST)}", "{{queue}} reconnected"),
                width=THIRD,
            )
        )
    )
