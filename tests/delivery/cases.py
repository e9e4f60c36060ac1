"""Public failures of fleets like this one, and the tests that say what is right.

A01 to A19 are failures of queue workers, B22 to B29 of batched serving, F1 and F2 workers lost between two
steps. A test may prove more than one, and most are proved both step by step and from end to end.
"""

from __future__ import annotations

_CALLS = "tests/common/test_calls.py"
_CLIENT = "tests/producer/test_client.py"
_LINES = "tests/delivery/test_bad_lines.py"
_LONG = "tests/delivery/test_long_work.py"
_LOST = "tests/common/test_lost_payloads.py"
_PROCESSES = "tests/delivery/test_processes.py"
_STOPS = "tests/delivery/test_stop_points.py"
_SUSPECTS = "tests/common/test_suspects.py"
_WORKER = "tests/worker/test_process.py"

WHAT: dict[str, str] = {
    "A01": "a write is sent twice by the client library",
    "A02": "replies shift by one after a cancelled command",
    "A03": "a subscription goes silent for ever after a loss of the network",
    "A04": "each reader leaves a connection behind",
    "A05": "two sweepers take the same entry at the same moment",
    "A06": "a healthy request is redelivered because it is long",
    "A07": "a worker's loop ends on a short interruption of Redis",
    "A08": "an id is refused long after its work has ended",
    "A09": "waiting for a result that will never be there hangs for ever",
    "A10": "cancellations are ignored after a reconnect",
    "A11": "a paused worker goes on writing what is another's by now",
    "A12": "after a reconnect the worker is up, but takes nothing",
    "A13": "a heartbeat starves under native code",
    "A14": "a request that kills its process loops for ever",
    "A15": "a worker's loop ends on an answer that it does not expect",
    "A16": "deleting a consumer drops what it was given",
    "A17": "work that was trimmed away is waited for for ever",
    "A18": "cancelled while waiting, computed all the same",
    "A19": "one bad request takes the engine and its neighbours down",
    "B22": "a queue without bounds computes for clients that are gone",
    "B26": "work that was taken is lost when its worker is killed",
    "B27": "long requests run again, and retries overtake or do not wait",
    "B29": "a slow reader, an idle loop, a dead engine, a drain that takes all its time",
    "F1": "a worker is killed between any two steps",
    "F2": "a worker sleeps for three leases between any two steps",
}

CASES: dict[str, tuple[str, ...]] = {
    "A01": (
        f"{_LINES}::test_a_submission_whose_reply_is_lost_is_there_once",
        f"{_CLIENT}::test_a_submit_whose_reply_is_lost_is_one_request",
        "tests/common/test_lost_replies.py::test_a_lost_reply_of_read_is_an_error_and_never_repeated",
    ),
    "A02": (
        f"{_CALLS}::test_no_answer_belongs_to_another_question",
        f"{_CALLS}::test_whoever_waits_gets_what_a_cancelled_one_did_not_take",
    ),
    "A03": (
        "tests/faults/test_lines.py::test_what_a_dead_subscription_misses_is_found_in_the_log",
        "tests/producer/test_stream.py::test_after_silence_the_log_is_read",
    ),
    "A04": (f"{_LINES}::test_a_crowd_of_streams_leaves_no_connection_behind",),
    "A05": ("tests/common/test_sweep.py::test_six_sweep_at_once",),
    "A06": (
        f"{_LONG}::test_a_long_request_is_run_once_however_often_its_lease_would_have_run_out",
        "tests/worker/test_leases.py::test_a_lease_outlives_many_renewals",
    ),
    "A07": (
        f"{_LINES}::test_connections_killed_again_and_again_and_then_the_server",
        "tests/faults/test_clients_cut.py::test_whatever_connections_are_cut_nothing_is_lost_or_doubled",
    ),
    "A08": (
        "tests/common/test_submit.py::test_the_same_again_is_a_duplicate",
        "tests/common/test_submit.py::test_the_same_rid_for_something_else_is_a_conflict",
        f"{_CLIENT}::test_a_key_stands_for_one_request",
    ),
    "A09": (
        f"{_CLIENT}::test_what_is_no_id_is_no_request",
        f"{_CLIENT}::test_cancel_tells_what_became_of_it",
        "tests/common/test_status.py::test_a_result_disappears_after_its_time",
    ),
    "A10": (f"{_LINES}::test_a_cancellation_needs_no_channel",),
    "A11": (
        f"{_PROCESSES}::test_a_worker_that_slept_for_three_leases_has_lost_its_work_and_its_voice",
        f"{_STOPS}::test_a_worker_lost_between_two_steps",
    ),
    "A12": (
        f"{_LINES}::test_a_flapping_line_makes_the_worker_unready_and_loses_nothing",
        "tests/worker/test_vitals.py::test_readiness_follows_redis",
    ),
    "A13": (
        f"{_PROCESSES}::test_a_step_that_holds_the_interpreter_for_less_than_a_lease_costs_nothing",
        f"{_PROCESSES}::test_one_that_holds_it_for_longer_loses_the_request_but_tells_nothing_twice",
        f"{_WORKER}::test_a_step_that_holds_the_interpreter_ends_the_process_too",
    ),
    "A14": (
        f"{_PROCESSES}::test_a_request_that_takes_its_worker_down_ends_alone",
        f"{_PROCESSES}::test_under_a_supervisor_too",
        f"{_SUSPECTS}::test_the_way_of_a_poison",
        f"{_SUSPECTS}::test_losses_in_company_convict_nobody",
        "tests/faults/test_poison.py::test_poison_dies_alone_and_takes_nobody_along",
    ),
    "A15": (
        f"{_LINES}::test_whatever_happens_to_a_waiting_read_it_waits_again",
        "tests/topology/test_real_errors.py::test_demoted_under_a_blocked_read",
        f"{_CALLS}::test_every_error_has_its_own_action",
    ),
    "A16": (
        f"{_LOST}::test_a_consumer_that_is_forgotten_takes_nothing_with_it",
        f"{_LOST}::test_consumers_long_idle_are_forgotten",
    ),
    "A17": (
        f"{_LONG}::test_trimmed_away_by_hand_each_request_ends_and_the_alarm_counts",
        f"{_LOST}::test_a_trimmed_stream_ends_all_it_held",
    ),
    "A18": (f"{_LONG}::test_waiting_and_cancelled_it_costs_no_step_and_running_it_frees_its_row",),
    "A19": (f"{_LONG}::test_a_request_that_fails_does_so_alone",),
    "B22": (
        f"{_LONG}::test_a_full_queue_refuses_and_nothing_is_computed_for_nobody",
        f"{_CLIENT}::test_a_full_queue_says_when_to_come_back",
    ),
    "B26": (
        f"{_STOPS}::test_a_worker_lost_between_two_steps",
        f"{_PROCESSES}::test_a_request_that_takes_its_worker_down_ends_alone",
    ),
    "B27": (
        f"{_LONG}::test_a_long_request_is_run_once_however_often_its_lease_would_have_run_out",
        f"{_LONG}::test_a_retry_waits_its_backoff_and_then_keeps_its_old_place",
        f"{_PROCESSES}::test_a_worker_that_slept_for_three_leases_has_lost_its_work_and_its_voice",
    ),
    "B29": (
        f"{_LONG}::test_readers_that_are_slow_hold_nobody_up",
        f"{_LONG}::test_when_an_engine_dies_nobody_waits_for_a_lease",
        f"{_PROCESSES}::test_idle_a_worker_takes_hardly_any_time",
        f"{_PROCESSES}::test_told_to_end_an_idle_worker_does_not_wait_for_its_drain_timeout",
        f"{_PROCESSES}::test_told_to_end_a_busy_worker_hands_over_what_it_cannot_finish",
    ),
    "F1": (f"{_STOPS}::test_a_worker_lost_between_two_steps",),
    "F2": (f"{_STOPS}::test_a_worker_lost_between_two_steps",),
}
