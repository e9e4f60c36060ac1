"""*Queue*: one queue in depth. What waits, how long, what becomes of it."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from panels import (
    HALF,
    QUEUE,
    THIRD,
    WINDOW,
    board,
    heat,
    lines,
    mean,
    number,
    quantile,
    quantiles,
    query,
    rate,
    swept,
    told,
)


def queue() -> dashboard.Dashboard:
    """The dashboard."""
    begun = board("queue", "One queue: what waits in it, for how long, and what becomes of it.")
    return _batches(_outcomes(_latency(_waiting(_now(begun)))))


def _now(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("Now"))
        .with_panel(
            number(
                "Open",
                "Accepted and unfinished requests by state.",
                "short",
                told("queue_depth", "state"),
                "{{state}}",
            )
        )
        .with_panel(
            number(
                "Limit",
                "Open requests at which the queue refuses more (max_queue_depth).",
                "short",
                told("queue_max_depth", "queue"),
                "limit",
            )
        )
        .with_panel(
            number(
                "Workers",
                "Live workers: ready ones take work, draining ones end what they have.",
                "none",
                told("queue_workers", "state"),
                "{{state}}",
            )
        )
        .with_panel(
            number(
                "First token, p95",
                "From acceptance to the first token, the slowest of twenty.",
                "s",
                quantile(0.95, "time_to_first_token_seconds"),
                "p95",
            )
        )
        .with_panel(
            number(
                "Dead letters",
                "Requests that kill workers, and entries that were none; kept until somebody drops them.",
                "short",
                told("queue_dead_letters"),
                "dead",
            )
        )
        .with_panel(
            number(
                "Paused",
                "1 where an operator has closed the queue: new requests are refused.",
                "none",
                told("queue_paused"),
                "paused",
            )
        )
    )


def _waiting(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("What waits"))
        .with_panel(
            lines(
                "Waiting by lane",
                "Requests that wait for a worker, those that came back included.",
                "short",
                query(told("queue_lane_depth", "lane"), "{{lane}}"),
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Oldest by lane",
                "How long the oldest request that waits has waited; 0 where none does.",
                "s",
                query(told("queue_oldest_age_seconds", "lane"), "{{lane}}"),
            )
        )
        .with_panel(
            lines(
                "Tokens to compute",
                "Tokens, of prompts and of the longest answers, of what waits and of all that is open.",
                "short",
                query(told("queue_waiting_tokens"), "waiting"),
                query(told("queue_open_tokens"), "open"),
            )
        )
        .with_panel(
            lines(
                "Ended",
                "Requests that ended a second: all of them, as Redis counts, and as workers tell.",
                "reqps",
                query(f"max by (queue) (rate(streamfleet_queue_ended_total{{{QUEUE}}}{WINDOW}))", "ended"),
                query(rate("request_success_total"), "answered"),
                query(rate("request_failure_total"), "failed"),
            )
        )
    )


def _latency(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("How long it takes"))
        .with_panel(
            lines(
                "Time in the queue",
                "From acceptance to a worker, on the server's clock.",
                "s",
                *quantiles("request_queue_time_seconds", ""),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Prompt and answer",
                "Mean time from the first forward pass to the first token, and from there to the last.",
                "s",
                query(mean("request_prefill_time_seconds"), "prompt"),
                query(mean("request_decode_time_seconds"), "answer"),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "From acceptance to the end",
                "All of a request's time, as its caller feels it.",
                "s",
                *quantiles("e2e_request_latency_seconds", ""),
                width=THIRD,
            )
        )
        .with_panel(
            heat(
                "First token",
                "Time from acceptance to the first token, of all requests.",
                "s",
                "time_to_first_token_seconds",
            )
        )
        .with_panel(
            heat(
                "Between tokens",
                "Time between two tokens of an answer, of all of them.",
                "s",
                "inter_token_latency_seconds",
            )
        )
    )


def _outcomes(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("What becomes of it"))
        .with_panel(
            lines(
                "Answers",
                "Answered requests, by the reason why the answer ended.",
                "reqps",
                query(rate("request_success_total", "finished_reason"), "{{finished_reason}}"),
                stacked=True,
                width=HALF,
            )
        )
        .with_panel(
            lines(
                "Failures",
                "Requests that ended without an answer, by kind; and those that sweeps ended.",
                "reqps",
                query(rate("request_failure_total", "error_type"), "{{error_type}}"),
                query(swept("outcome"), "{{outcome}} by a sweep"),
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Tried again",
                "Requests that wait for their next try; and, a minute, requests started that somebody had "
                "started before, leases lost, and writes refused.",
                "short",
                query(told("queue_retrying"), "wait for a try"),
                query(f"60 * {rate('redeliveries_total')}", "redelivered, a minute"),
                query(f"60 * {rate('leases_lost_total')}", "leases lost, a minute"),
                query(f"60 * {rate('fenced_writes_total')}", "fenced, a minute"),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Swept",
                "Requests that sweeps ended or put back, a minute: the workers of requeued ones were lost.",
                "short",
                query(f"60 * {rate('swept_total', 'outcome')}", "{{outcome}}"),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Last sweep",
                "Age of the last look for deadlines that passed and leases that ran out; workers make it.",
                "s",
                query(told("queue_last_sweep_age_seconds"), "age"),
                width=THIRD,
            )
        )
    )


def _batches(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("What it is like"))
        .with_panel(
            lines(
                "Lengths",
                "Mean tokens of prompts and answers.",
                "short",
                query(mean("request_prompt_tokens"), "prompt"),
                query(mean("request_generation_tokens"), "answer"),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Cut",
                "Texts that were longer than the model reads, and tokens that were cut from them, a minute.",
                "short",
                query(f"60 * {rate('truncated_total')}", "texts"),
                query(f"60 * {rate('truncated_tokens_total')}", "tokens"),
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Throughput",
                "Prompt tokens computed and tokens generated, a second.",
                "short",
                query(rate("prompt_tokens_total"), "prompt"),
                query(rate("generation_tokens_total"), "generated"),
                width=THIRD,
            )
        )
    )
