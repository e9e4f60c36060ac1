"""Scripts with one fault each, and the test that notices it.

`python tests/broker_mutants.py` prints the table; `test_broker_mutants.py` proves it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from broker_parts import submission
from common import (
    test_admission,
    test_bills,
    test_cancel,
    test_emit,
    test_expiry,
    test_finish,
    test_hand_back,
    test_leases,
    test_ledger,
    test_lost_payloads,
    test_lost_replies,
    test_move,
    test_read,
    test_release,
    test_retry,
    test_shares,
    test_start,
    test_sub_lanes,
    test_submit,
    test_subscriber,
    test_suspects,
    test_sweep,
    test_take,
    test_watched,
)
from server_view import RID
from streamfleet_common.scripts import ScriptName

Test = Callable[..., Awaitable[None]]


@dataclass(frozen=True)
class Mutant:
    """`right` becomes `wrong` in the script; `caught_by` is called with `values`, besides fixtures."""

    name: str
    script: ScriptName
    right: str
    wrong: str
    caught_by: Test
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def witness(self) -> str:
        return witness(self.caught_by)


FENCE = "and sub(record, 15, 14 + #fence) == fence"
PLACE = "call('ZREM', T .. ':open', unpack(ended.rids))"
UNSTARTED = "elseif owner == '' then\n        -- Given out, but never begun: nobody died of it."
DISCARD = "for code, eids in pairs(ended.entries) do discard(code, eids) end"
ACK = "redis.pcall('XACK', T .. STREAMS[code], 'w', unpack(eids))"
EPOCH_OF_END = "epoch = string.format('%.0f', epoch + 1)\n  local head"
SAME = "match(head, '|[^|]*|[^|]*$') == match(ARGV[at + 2], '|[^|]*|[^|]*$')"
LOGGED = "if log(rid, id, frame) then"

SUBMIT: list[Mutant] = [
    Mutant(
        "one place too many",
        "submit",
        "depth >= limit",
        "depth > limit",
        test_submit.test_full_at_exactly_the_limit,
    ),
    Mutant(
        "no duplicate within a batch",
        "submit",
        "known[i] or batch[rid]",
        "known[i]",
        test_submit.test_the_same_again_is_a_duplicate,
    ),
    Mutant(
        "any body is a duplicate",
        "submit",
        SAME,
        SAME.replace("|[^|]*|[^|]*$", "|([^|]*)|[^|]*$"),
        test_submit.test_the_same_rid_for_something_else_is_a_conflict,
        {"other": submission("Bye", rid=RID)},
    ),
    Mutant(
        "any tenant's is a duplicate",
        "submit",
        SAME,
        SAME.replace("|[^|]*|[^|]*$", "|[^|]*$"),
        test_submit.test_the_same_rid_for_something_else_is_a_conflict,
        {"other": submission(rid=RID, tenant="acme")},
    ),
    Mutant(
        "MAXLEN on a lane",
        "submit",
        "'XADD', key, '*'",
        "'XADD', key, 'MAXLEN', 2, '*'",
        test_submit.test_a_batch_is_taken_in_order,
    ),
    Mutant(
        "tokens are not counted",
        "submit",
        "added = added + cost",
        "",
        test_admission.test_tokens_at_exactly_the_limit,
    ),
    Mutant(
        "one token too few",
        "submit",
        "tokens + cost > token_limit",
        "tokens + cost >= token_limit",
        test_admission.test_tokens_at_exactly_the_limit,
    ),
    Mutant(
        "a large request never comes in",
        "submit",
        "and depth > 0 and",
        "and",
        test_admission.test_an_empty_queue_takes_any_one_request,
    ),
    Mutant(
        "a paused queue goes on",
        "submit",
        "control[3] == '1' and 'paused' or",
        "",
        test_admission.test_a_paused_queue_takes_nothing_new,
    ),
    Mutant(
        "a crowded server takes more",
        "submit",
        "tonumber(control[4] or 0) > now and 'memory'",
        "nil",
        test_admission.test_a_crowded_server_takes_nothing_new,
    ),
]
START: list[Mutant] = [
    Mutant(
        "start by anybody",
        "start",
        "its_owner ~= '' and its_owner ~= owner",
        "false",
        test_start.test_another_owner_is_told_that_it_lost,
    ),
    Mutant(
        "start of a superseded entry",
        "start",
        "or its_place ~= place",
        "",
        test_start.test_a_superseded_entry_is_gone,
    ),
    Mutant(
        "start again opens another epoch",
        "start",
        "'^Q(%d+)|(%d+)|([^|]*)||",
        "'^[QR](%d+)|(%d+)|([^|]*)|[^|]*|",
        test_start.test_start_again_gives_the_same_epoch,
    ),
    Mutant(
        "start after the deadline",
        "start",
        "tonumber(deadline) <= tonumber(now)",
        "false",
        test_start.test_a_late_start_expires,
    ),
    Mutant(
        "start buries garbage each time",
        "start",
        "call('XDEL', T .. STREAMS[code], eid) == 1",
        "call('XDEL', T .. STREAMS[code], eid) >= 0",
        test_start.test_garbage_in_a_lane_goes_to_the_dead_letter_once,
        {"lane": "normal"},
    ),
    Mutant(
        "start twice in a batch",
        "start",
        "local outcome = seen[name]",
        "local outcome",
        test_start.test_a_late_start_expires,
    ),
    Mutant(
        "XACK before finish",
        "start",
        "attempts = string.format('%.0f', attempts + 1)",
        "attempts = string.format('%.0f', attempts + 1)\n"
        "    call('XACK', T .. STREAMS[sub(place, 1, 1)], 'w', sub(place, 2))",
        test_sweep.test_a_silent_owner_loses_its_work,
    ),
    Mutant(
        "a group is made at $",
        "start",
        "'CREATE', key, 'w', '0'",
        "'CREATE', key, 'w', '$'",
        test_take.test_a_group_that_vanished_is_made_again_within_the_call,
        {"harm": "destroyed"},
    ),
    Mutant(
        "the room is for each stream",
        "start",
        "count = count - 1",
        "",
        test_take.test_the_room_is_for_all_streams_together,
        {"count": 3},
    ),
    Mutant(
        "a suspect has company",
        "start",
        "break -- a suspect runs alone",
        "",
        test_suspects.test_a_suspect_is_taken_alone,
    ),
    Mutant(
        "two suspects at once",
        "start",
        "letter == 'S' and 1 or count",
        "count",
        test_suspects.test_a_suspect_is_taken_alone,
    ),
    Mutant(
        "everybody makes room for a suspect",
        "start",
        "if asked == owner or tonumber(until_) < tonumber(now) then",
        "if true then",
        test_suspects.test_one_owner_is_asked_to_make_room,
    ),
    Mutant(
        "nobody makes room for a suspect",
        "start",
        "replies[1] = 1",
        "",
        test_suspects.test_one_owner_is_asked_to_make_room,
    ),
    Mutant(
        "a pause ends with a sweep only",
        "start",
        "    back.wake(now, count)",
        "",
        test_retry.test_it_comes_back_after_its_pause,
        {"by": "take"},
    ),
]
RUN: list[Mutant] = [
    Mutant(
        "emit without a fence",
        "emit",
        FENCE,
        "",
        test_emit.test_the_fence,
        {"changes": {"owner": "w2"}},
    ),
    Mutant(
        "emit through bare PUBLISH",
        "emit",
        LOGGED,
        "if true then",
        test_emit.test_emit_logs_and_publishes,
    ),
    Mutant(
        "emit publishes repetitions",
        "emit",
        LOGGED,
        "log(rid, id, frame) if true then",
        test_emit.test_emit_again_doubles_nothing,
    ),
    Mutant(
        "finish without a fence",
        "finish",
        FENCE,
        "",
        test_emit.test_the_fence,
        {"changes": {"epoch": 2}},
    ),
    Mutant(
        "finish whatever the state",
        "finish",
        f"sub(record, 1, 1) == 'R' {FENCE}",
        "true",
        test_emit.test_the_fence_before_and_after_a_run,
    ),
    Mutant(
        "finish keeps the place",
        "finish",
        PLACE,
        "",
        test_finish.test_finish_makes_the_record_the_result,
        {"stream": False},
    ),
    Mutant(
        "finish keeps the entry",
        "finish",
        DISCARD,
        "",
        test_finish.test_finish_makes_the_record_the_result,
        {"stream": False},
    ),
    Mutant(
        "finish does not acknowledge",
        "finish",
        ACK,
        "",
        test_finish.test_finish_makes_the_record_the_result,
        {"stream": False},
    ),
    Mutant(
        "finish keeps the epoch",
        "finish",
        EPOCH_OF_END,
        "local head",
        test_finish.test_finish_makes_the_record_the_result,
        {"stream": True},
    ),
    Mutant(
        "finish without a life",
        "finish",
        ", 'PX', ttl)",
        ")",
        test_finish.test_finish_makes_the_record_the_result,
        {"stream": False},
    ),
    Mutant(
        "finish twice in a batch",
        "finish",
        "if done[rid] then record = done[rid] end",
        "",
        test_finish.test_finish_twice_in_a_batch_ends_once,
    ),
    Mutant(
        "finish again is refused",
        "finish",
        "if repeated(",
        "if nil and repeated(",
        test_finish.test_finish_again_is_the_same_answer_and_no_second_end,
    ),
    Mutant(
        "any end is a repetition",
        "finish",
        "and sub(record, -#event - 1) == ' ' .. event",
        "",
        test_finish.test_finish_again_is_the_same_answer_and_no_second_end,
    ),
    Mutant(
        "finish keeps the tokens",
        "finish",
        "sums.tokens = sums.tokens + tokens",
        "",
        test_admission.test_every_end_gives_its_tokens_back,
        {"way": "finish"},
    ),
    Mutant(
        "a retry knows no pause",
        "finish",
        "if pause and pause > 0 then",
        "if false then",
        test_retry.test_it_waits_for_its_pause_outside_of_the_streams,
    ),
    Mutant(
        "a retry knows only its own pause",
        "finish",
        "tonumber(sub(letter, 2)) or true",
        "true",
        test_retry.test_it_waits_as_long_as_its_worker_says,
        {"backoff_ms": 0, "attempts": 1},
    ),
    Mutant(
        "a retry has no pause of its own",
        "finish",
        "tonumber(sub(letter, 2)) or true",
        "tonumber(sub(letter, 2)) or 0",
        test_retry.test_it_waits_for_its_pause_outside_of_the_streams,
    ),
    Mutant(
        "the pause that is said has no end",
        "finish",
        "pause = math.min(pause, MAX_BACKOFF_MS)",
        "",
        test_retry.test_it_waits_an_hour_at_most,
    ),
    Mutant(
        "no end of tries for who says when",
        "finish",
        "limit > 0 and tonumber(attempts) >= limit",
        "pause == true and limit > 0 and tonumber(attempts) >= limit",
        test_retry.test_a_pause_that_is_said_is_a_try_as_well,
        {"attempts": 2},
    ),
    Mutant(
        "a said pause is another end when it is repeated",
        "finish",
        "if sub(letter, 1, 1) == 'T' then letter = 'F' end\n  return",
        "if letter == 'T' then letter = 'F' end\n  return",
        test_retry.test_the_last_try_with_a_pause_may_be_told_twice,
    ),
    Mutant(
        "the pause does not grow",
        "finish",
        "backoff * 2 ^ math.min(attempts - 1, 30)",
        "backoff",
        test_retry.test_the_pause_doubles,
    ),
    Mutant(
        "the pause grows without end",
        "finish",
        "MAX_BACKOFF_MS = 3600000",
        "MAX_BACKOFF_MS = 36000000",
        test_retry.test_the_pause_doubles,
    ),
    Mutant(
        "tried for ever",
        "finish",
        "limit > 0 and tonumber(attempts) >= limit",
        "false",
        test_retry.test_three_tries_where_the_request_says_nothing,
    ),
    Mutant(
        "one try too many",
        "finish",
        "tonumber(attempts) >= limit",
        "tonumber(attempts) > limit",
        test_retry.test_as_many_tries_as_the_request_allows,
        {"attempts": 2},
    ),
    Mutant(
        "a retry keeps the epoch",
        "finish",
        "string.format('%.0f', epoch + 1) .. '|' .. letter",
        "epoch .. '|' .. letter",
        test_retry.test_without_a_pause_it_goes_back_at_once,
        {"lane": "normal"},
    ),
    Mutant(
        "a retry goes behind the newcomers",
        "finish",
        "return string.upper(lane)",
        "return lane",
        test_retry.test_it_goes_before_the_newcomers,
    ),
    Mutant(
        "a text begins anew that would rather fail",
        "finish",
        "shown = last and",
        "shown = false and",
        test_retry.test_one_that_would_rather_fail_than_begin_anew,
        {"is_shown": True, "backoff_ms": 0},
    ),
]
GIVE_UP: list[Mutant] = [
    Mutant(
        "cancel for anybody",
        "cancel",
        "match(head, '|([^|]*)|[^|]*$') ~= tenant",
        "false",
        test_cancel.test_cancel_in_every_state,
    ),
    Mutant(
        "cancel twice in a batch",
        "cancel",
        "elseif seen[rid] then",
        "elseif false then",
        test_cancel.test_cancel_twice_in_a_batch,
    ),
    Mutant("cancel keeps the place", "cancel", PLACE, "", test_cancel.test_cancel_in_every_state),
    Mutant(
        "cancel only sets a flag",
        "cancel",
        "terminal(rid, record, 'C', event, now)",
        "call('HSET', T .. ':control', 'cancel:' .. rid, 1)",
        test_cancel.test_cancel_in_every_state,
    ),
    Mutant(
        "a renewal without a fence",
        "renew",
        FENCE,
        "",
        test_leases.test_what_another_took_is_lost_and_stays_with_it,
    ),
    Mutant(
        "a renewal in another's name",
        "renew",
        "and sub(fence, -#owner - 2) == '|' .. owner .. '|'",
        "",
        test_leases.test_a_renewal_in_the_name_of_another_is_none,
    ),
    Mutant(
        "a renewal is a delivery",
        "renew",
        "eids[#eids + 1] = 'JUSTID'",
        "",
        test_leases.test_renewals_are_no_deliveries,
    ),
    Mutant(
        "a renewal does not claim",
        "renew",
        "redis.pcall('XCLAIM', T .. STREAMS[code], 'w', owner, 0, unpack(eids))",
        "",
        test_leases.test_a_renewal_starts_the_lease_anew,
    ),
    Mutant(
        "nobody is asked to drain",
        "renew",
        "call('HEXISTS', T .. ':control', 'drain:' .. owner)",
        "0",
        test_leases.test_an_owner_is_asked_to_drain,
    ),
    Mutant(
        "release without a fence",
        "release",
        f"elseif fence ~= '' {FENCE} then",
        "else",
        test_release.test_what_is_not_ours_stays,
    ),
    Mutant(
        "an entry speaks for its owner",
        "release",
        "fence ~= '' and",
        "",
        test_release.test_a_running_request_is_given_back_by_its_owner_only,
    ),
    Mutant(
        "release twice in a batch",
        "release",
        "and not done[rid]",
        "",
        test_release.test_twice_is_once,
    ),
    Mutant(
        "a stop on purpose counts",
        "handback",
        "ARGV[2] == '1'",
        "true",
        test_hand_back.test_a_stop_on_purpose_counts_against_nothing,
    ),
    Mutant(
        "what was only read counts",
        "handback",
        UNSTARTED,
        "elseif false then",
        test_hand_back.test_a_crash_counts_against_what_ran,
    ),
    Mutant(
        "all is handed back, whose it may be",
        "handback",
        "limit - taken, owner)",
        "limit - taken)",
        test_hand_back.test_others_keep_theirs,
    ),
    Mutant(
        "dead letters keep every payload",
        "handback",
        "if keep_payload then",
        "if true then",
        test_suspects.test_a_dead_letter_has_the_payload_if_the_fleet_says_so,
        {"is_kept": False},
    ),
    Mutant(
        "a consumer goes with what it holds",
        "announce",
        "if not found.err and #found == 0 then",
        "if true then",
        test_lost_payloads.test_a_consumer_that_is_forgotten_takes_nothing_with_it,
        {"way": "leaves"},
    ),
    Mutant(
        "the lease of the workers is not known",
        "announce",
        "'lease_ms', ARGV[6]",
        "'lease', ARGV[6]",
        test_sweep.test_the_lease_that_a_worker_announced_counts,
    ),
]
SWEEP: list[Mutant] = [
    Mutant(
        "expired before the deadline",
        "sweep",
        "T .. ':open', '-inf', now",
        "T .. ':open', '-inf', '+inf'",
        test_expiry.test_a_sweep_ends_what_is_due,
    ),
    Mutant("an expiry keeps the place", "sweep", PLACE, "", test_expiry.test_a_sweep_ends_what_is_due),
    Mutant(
        "sweep without a guard",
        "sweep",
        "if not last or at - last > lease / 2 then",
        "if false then",
        test_sweep.test_after_half_a_lease_without_a_sweep_all_have_grace,
        {"pause": 0.6, "is_grace": True},
    ),
    Mutant(
        "grace is over at once",
        "sweep",
        "grace_until = now + lease",
        "grace_until = now",
        test_sweep.test_grace_lasts_one_lease,
    ),
    Mutant(
        "whoever is slow is silent",
        "sweep",
        "pending(code, lease, left)",
        "pending(code, 0, left)",
        test_sweep.test_only_what_is_silent_is_taken,
    ),
    Mutant(
        "read but not begun counts",
        "sweep",
        UNSTARTED,
        "elseif false then",
        test_sweep.test_read_but_not_begun_costs_nothing,
    ),
    Mutant(
        "crash count from XPENDING",
        "sweep",
        "crashes = string.format('%.0f', crashes + 1)",
        "crashes = tostring(call('XPENDING', T .. STREAMS[code], 'w', eid, eid, 1)[1][4])",
        test_suspects.test_the_way_of_a_poison,
    ),
    Mutant(
        "suspects never run alone",
        "sweep",
        "if tonumber(crashes) >= COMPANY then return 'S' end",
        "",
        test_suspects.test_the_way_of_a_poison,
    ),
    Mutant(
        "alone from the first loss on",
        "sweep",
        "COMPANY = 2",
        "COMPANY = 1",
        test_suspects.test_the_way_of_a_poison,
    ),
    Mutant(
        "a loss in company convicts",
        "sweep",
        "if code == 'S' then solo",
        "if true then solo",
        test_suspects.test_losses_in_company_convict_nobody,
    ),
    Mutant(
        "one loss alone convicts",
        "sweep",
        "MAX_SOLO = 2",
        "MAX_SOLO = 1",
        test_suspects.test_one_loss_alone_is_not_enough,
    ),
    Mutant(
        "nothing ever convicts",
        "sweep",
        "counted and tonumber(solo) >= MAX_SOLO",
        "false",
        test_suspects.test_the_way_of_a_poison,
    ),
    Mutant(
        "a pause never ends by itself",
        "sweep",
        "back.wake(now, limit)",
        "",
        test_retry.test_it_comes_back_after_its_pause,
        {"by": "sweep"},
    ),
    Mutant(
        "what came back still waits",
        "sweep",
        "if #ended.later > 0 then call('ZREM', T .. ':later', unpack(ended.later)) end",
        "",
        test_retry.test_it_comes_back_after_its_pause,
        {"by": "sweep"},
    ),
    Mutant(
        "no audit",
        "sweep",
        "if #slice > 0 and not grace then",
        "if false then",
        test_lost_payloads.test_a_trimmed_stream_ends_all_it_held,
    ),
    Mutant(
        "the audit robs the living",
        "sweep",
        "if not card or tonumber(match(card, '^%d+') or 0) < at then",
        "if true then",
        test_lost_payloads.test_a_trimmed_stream_ends_all_it_held,
    ),
    Mutant(
        "the audit is impatient",
        "sweep",
        "> 2000",
        ">= 0",
        test_lost_payloads.test_a_young_entry_may_only_be_on_its_way,
    ),
    Mutant(
        "idle consumers go with what they hold",
        "sweep",
        "values.pending == 0 and",
        "",
        test_lost_payloads.test_consumers_long_idle_are_forgotten,
    ),
]
TENANTS: list[Mutant] = [
    Mutant(
        "one request over the share",
        "submit",
        "open >= one.most then",
        "open > one.most then",
        test_shares.test_open_requests_at_exactly_the_share,
    ),
    Mutant(
        "a share forgets the batch",
        "submit",
        "one.added = one.added + 1",
        "one.added = 1",
        test_shares.test_open_requests_at_exactly_the_share,
    ),
    Mutant(
        "one token under the share",
        "submit",
        "tokens + cost > one.most_tokens",
        "tokens + cost >= one.most_tokens",
        test_shares.test_open_tokens_at_exactly_the_share,
    ),
    Mutant(
        "a large request of a tenant never comes in",
        "submit",
        "one.most_tokens > 0 and open > 0 and",
        "one.most_tokens > 0 and",
        test_shares.test_who_has_nothing_open_may_have_any_one_request,
    ),
    Mutant(
        "a budget forgets what was used",
        "submit",
        "one.used + tokens + cost > one.daily",
        "tokens + cost > one.daily",
        test_shares.test_a_days_tokens_are_those_used_and_those_open,
    ),
    Mutant(
        "a budget forgets what is open",
        "submit",
        "one.used + tokens + cost > one.daily",
        "one.used + cost > one.daily",
        test_shares.test_a_days_tokens_are_those_used_and_those_open,
    ),
    Mutant(
        "all tenants have one share together",
        "submit",
        "'HMGET', T .. ':tenants', tenant, tenant .. '|t'",
        "'HMGET', T .. ':tenants', order[1], order[1] .. '|t'",
        test_shares.test_one_tenant_over_its_share_in_a_batch_of_two,
    ),
    Mutant(
        "everybody's share is nobody's",
        "submit",
        "shares[i + 1] or shares[1] or",
        "shares[i + 1] or",
        test_shares.test_the_share_of_everybody_is_for_each_who_has_none,
    ),
    Mutant(
        "a tenant is not counted without a share",
        "submit",
        "if one.added > 0 then redis.pcall",
        "if one.added > 0 and one.most then redis.pcall",
        test_shares.test_a_share_counts_what_was_open_before_it,
    ),
    Mutant(
        "all wait in the first sub-lane",
        "submit",
        "if sub_lane > 0 then",
        "if false then",
        test_sub_lanes.test_a_tenant_waits_in_the_sub_lane_of_its_name,
        {"tenant": "acme", "lane": "bulk"},
    ),
    Mutant(
        "the record names another sub-lane",
        "submit",
        "lane .. sub_lane .. '.'",
        "lane .. sub_lane + 1 .. '.'",
        test_sub_lanes.test_a_tenant_waits_in_the_sub_lane_of_its_name,
        {"tenant": "acme", "lane": "bulk"},
    ),
    Mutant(
        "the first sub-lane takes all the room",
        "start",
        "math.floor(count / #waiting)",
        "count",
        test_sub_lanes.test_each_sub_lane_that_holds_something_gives_as_many,
        {"waiting": {"acme": 10, "beta": 10}, "count": 8, "wanted": {3: 4, 5: 4}},
    ),
    Mutant(
        "room is left that others could have",
        "start",
        "waiting = more",
        "waiting = {}",
        test_sub_lanes.test_each_sub_lane_that_holds_something_gives_as_many,
        {"waiting": {"acme": 10, "beta": 1}, "count": 8, "wanted": {3: 7, 5: 1}},
    ),
    Mutant(
        "every turn begins at the first sub-lane",
        "start",
        "(last + 1) % top",
        "0",
        test_sub_lanes.test_turns_go_on_over_all_workers,
    ),
    Mutant(
        "the turn goes on by one whoever was read",
        "start",
        "(last + 1) % top",
        "(turn + 1) % top",
        test_sub_lanes.test_turns_go_on_over_all_workers,
    ),
    Mutant(
        "finish keeps the tenant's request",
        "finish",
        "count_down(tenants, tenant, one.ends)",
        "",
        test_shares.test_every_end_gives_back_what_it_counted_for,
        {"way": "finish", "sub_lanes": 1},
    ),
    Mutant(
        "an end takes one request off, however many there were",
        "cancel",
        "sums.ends = sums.ends + 1",
        "sums.ends = 1",
        test_ledger.test_an_end_of_several_takes_all_of_them_off,
    ),
    Mutant(
        "a repeated finish is booked again",
        "finish",
        "if repeated(record, fence, letter, ARGV[at + 3]) then",
        "if repeated(record, fence, letter, ARGV[at + 3]) then\n"
        "      call('HINCRBY', T .. ':usage:' .. day_of(now), 'acme|requests', 1)",
        test_ledger.test_a_finish_that_is_said_again_counts_once,
    ),
    Mutant(
        "tokens are not booked",
        "finish",
        "spent[rid] = ARGV[at + 4]",
        "",
        test_ledger.test_a_batch_is_added_up_by_tenant,
    ),
    Mutant(
        "all failures are successes",
        "finish",
        "if letter == 'F' or letter == 'P' then sums.failed = sums.failed + 1 end",
        "",
        test_ledger.test_a_batch_is_added_up_by_tenant,
    ),
    Mutant(
        "the ledger has no life",
        "finish",
        "if sum == one.ends then redis.pcall('PEXPIRE', ledger, USAGE_MS) end",
        "",
        test_ledger.test_a_day_is_kept_for_so_long,
    ),
    Mutant(
        "a cancelled request runs on",
        "cancel",
        "if sub(record, 1, 1) == 'R' then ended.running = ended.running + tokens end",
        "",
        test_watched.test_tokens_run_from_the_start_until_the_request_leaves,
        {"way": "cancel"},
    ),
    Mutant(
        "what waits for its next try runs",
        "finish",
        "if owner ~= '' then ended.running =",
        "if false then ended.running =",
        test_watched.test_tokens_run_from_the_start_until_the_request_leaves,
        {"way": "retry later"},
    ),
    Mutant(
        "a second start counts again",
        "start",
        "if begun > 0 then",
        "for i, rid in ipairs(rids) do begun = begun + 139 end\nif begun > 0 then",
        test_watched.test_a_start_that_is_asked_for_again_counts_once,
    ),
    Mutant(
        "each submission is the oldest",
        "submit",
        "if not noted[i] or noted[i] == '0' then",
        "if true then",
        test_watched.test_a_submission_notes_that_it_is_the_oldest_of_its_lane,
    ),
    Mutant(
        "after a sweep nobody is the oldest",
        "submit",
        "if not noted[i] or noted[i] == '0' then",
        "if not noted[i] then",
        test_watched.test_after_a_sweep_that_found_nobody_the_next_one_notes_itself,
    ),
    Mutant(
        "a deleted record keeps what it counted for",
        "sweep",
        "call('HGET', T .. ':sweep', 'recount') == '1'",
        "false",
        test_shares.test_counts_are_made_anew_where_records_were_deleted,
    ),
    Mutant(
        "sub-lanes are forgotten with what they hold",
        "sweep",
        "redis.pcall('XLEN', T .. STREAMS[code]) == 0 and",
        "",
        test_sub_lanes.test_nothing_is_left_behind_when_their_number_changes,
        {"to": 1},
    ),
    Mutant(
        "sub-lanes are forgotten with what is given out",
        "sweep",
        "(found.err ~= nil or found[1] == 0)",
        "true",
        test_sub_lanes.test_a_pending_entry_keeps_its_sub_lane,
    ),
    Mutant(
        "fewer sub-lanes are read at once",
        "announce",
        "math.max(wanted, top)",
        "wanted",
        test_sub_lanes.test_nothing_is_left_behind_when_their_number_changes,
        {"to": 1},
    ),
    Mutant(
        "a worker's death is not seen in its sub-lanes",
        "handback",
        "back.all_codes(back.sub_lanes())",
        "back.all_codes(1)",
        test_sub_lanes.test_what_comes_back_from_a_sub_lane,
        {"way": "handed back"},
    ),
    Mutant(
        "silence is not seen in sub-lanes",
        "sweep",
        "local codes = back.all_codes(top)",
        "local codes = back.all_codes(1)",
        test_sub_lanes.test_what_comes_back_from_a_sub_lane,
        {"way": "lost"},
    ),
    Mutant(
        "a lost note of the sub-lanes stays lost",
        "sweep",
        "if top > noted then",
        "if false then",
        test_sub_lanes.test_a_note_that_was_deleted_is_found_again,
    ),
    Mutant(
        "a lost note stays lost where nobody splits",
        "sweep",
        "local noted = tonumber(call('HGET', T .. ':control', 'sub_lanes_top')) or 1",
        "local noted = top",
        test_sub_lanes.test_a_note_that_was_deleted_comes_back_though_no_worker_splits_any_more,
    ),
    Mutant(
        "a sweep takes as many of each sub-lane",
        "sweep",
        "left = left - #eids",
        "",
        test_sub_lanes.test_one_call_of_a_sweep_takes_no_more_of_many_sub_lanes_than_of_one,
    ),
    Mutant(
        "who is lazy leaves what one call cannot take",
        "sweep",
        "if more == 0 then --",
        "if true then --",
        test_sweep.test_who_is_lazy_takes_all_the_same_what_one_call_cannot,
    ),
]
BILLS: list[Mutant] = [
    Mutant(
        "what was cancelled is never charged",
        "cancel",
        "sign = '|+'",
        "",
        test_bills.test_what_it_took_is_charged_once,
        {"way": "cancelled", "teller": "a bill"},
    ),
    Mutant(
        "what was swept away is never charged",
        "sweep",
        "(letter == 'C' or letter == 'X') and",
        "letter == 'C' and",
        test_bills.test_what_it_took_is_charged_once,
        {"way": "expired", "teller": "a bill"},
    ),
    Mutant(
        "a finish that comes too late charges nothing",
        "finish",
        "done[rid] = bill(",
        "done[rid] = letter ~= 'B' and record or bill(",
        test_bills.test_what_it_took_is_charged_once,
        {"way": "cancelled", "teller": "a finish"},
    ),
    Mutant(
        "a bill counts as often as it is told",
        "finish",
        "call('SET', T .. ':r:' .. rid, state .. rest, 'KEEPTTL')",
        "",
        test_bills.test_what_it_took_is_charged_once,
        {"way": "cancelled", "teller": "a bill"},
    ),
    Mutant(
        "a bill counts twice in a batch",
        "finish",
        "done[rid] = bill(",
        "bill(",
        test_bills.test_what_it_took_is_charged_once,
        {"way": "cancelled", "teller": "a bill"},
    ),
    Mutant(
        "a bill makes a result live for ever",
        "finish",
        ", 'KEEPTTL'",
        "",
        test_bills.test_its_record_waits_for_the_bill_however_short_its_life,
    ),
    Mutant(
        "a result is gone before its bill",
        "cancel",
        "ttl = BILL_MS",
        "ttl = ttl",
        test_bills.test_its_record_waits_for_the_bill_however_short_its_life,
    ),
    Mutant(
        "a bill is waited for where nobody ran it",
        "cancel",
        "and sub(record, 1, 1) == 'R' and not spent[rid]",
        "",
        test_bills.test_a_record_with_nothing_to_wait_for_lives_as_long_as_it_was_asked_to,
        {"is_begun": False},
    ),
    Mutant(
        "a bill of any attempt counts",
        "finish",
        "tonumber(epoch) - 1 ~= tonumber(match(fence, '^|(%d+)|'))",
        "false",
        test_bills.test_an_attempt_that_was_over_before_is_not_charged,
    ),
    Mutant(
        "a worker is charged for its own end once more",
        "finish",
        "and not spent[rid]",
        "",
        test_bills.test_an_end_of_the_worker_s_own_is_charged_by_that_alone,
        {"state": "expired"},
    ),
    Mutant(
        "a bill ends what runs",
        "finish",
        "if done[rid] then record = done[rid] end",
        "if done[rid] then record = done[rid] end\n"
        "  if letter == 'B' and record and sub(record, 1, 1) == 'R' then letter = 'F' end",
        test_bills.test_a_bill_ends_nothing,
        {"state": "running"},
    ),
    Mutant(
        "a ledger that begins with a bill has no life",
        "finish",
        "redis.pcall('PEXPIRE', ledger, USAGE_MS) -- its first",
        "-- its first",
        test_bills.test_a_bill_of_the_next_day_gives_its_ledger_a_life,
    ),
]

MOVE: list[Mutant] = [
    Mutant(
        "a move takes what a worker was given",
        "move",
        "if not given.err and #given > 0 then",
        "if false then",
        test_move.test_what_a_worker_has_is_left_alone,
    ),
    Mutant(
        "a move takes what runs",
        "move",
        "if owner ~= '' then return 'running' end",
        "",
        test_move.test_what_a_worker_has_is_left_alone,
    ),
    Mutant(
        "a move leaves the old entry",
        "move",
        "leave(place, rid)\n  end\n  -- The same",
        "end\n  -- The same",
        test_move.test_it_waits_behind_those_of_the_other_lane,
        {"source": "normal", "to": "bulk"},
    ),
    Mutant(
        "a move leaves the old place",
        "move",
        "'|' .. new_place ..",
        "'|' .. place ..",
        test_move.test_it_waits_behind_those_of_the_other_lane,
        {"source": "normal", "to": "bulk"},
    ),
    Mutant(
        "a move leaves the old lane",
        "move",
        "'|' .. to .. rest",
        "'|' .. lane .. rest",
        test_move.test_what_waits_for_its_next_try_comes_back_to_the_other_lane,
    ),
    Mutant(
        "a second move moves again",
        "move",
        "if lane == to then return 'there' end",
        "",
        test_move.test_a_second_move_finds_it_there,
    ),
    Mutant(
        "twice in a batch is moved twice",
        "move",
        "elseif seen[rid] then",
        "elseif false then",
        test_move.test_a_second_move_finds_it_there,
    ),
    Mutant(
        "a move from any lane",
        "move",
        "if from ~= '' and lane ~= from then",
        "if false then",
        test_move.test_a_second_move_finds_it_there,
    ),
    Mutant(
        "a move of any tenant's",
        "move",
        "if whose ~= '' and tenant ~= whose then",
        "if false then",
        test_move.test_others_requests_and_ended_ones_are_left_alone,
    ),
    Mutant(
        "a suspect is moved among others",
        "move",
        "if tonumber(crashes) >= COMPANY then",
        "if false then",
        test_move.test_a_suspect_stays_alone,
    ),
    Mutant(
        "a move forgets the sub-lane",
        "move",
        "if number > 0 then new_code = to .. number end",
        "",
        test_move.test_it_waits_in_the_sub_lane_of_its_tenant,
    ),
    Mutant(
        "what came back is moved among the newcomers",
        "move",
        "if find(code, '^[HNB]') then",
        "if false then",
        test_move.test_what_came_back_goes_before_the_newcomers,
    ),
    Mutant(
        "a move loses the payload of the next try",
        "move",
        ".. to .. rest)",
        ".. to .. match(rest, '^[^\\n]*'))",
        test_move.test_what_waits_for_its_next_try_comes_back_to_the_other_lane,
    ),
    Mutant(
        "what was moved is noted as young",
        "move",
        "if noted == 0 or oldest < noted then",
        "if noted == 0 then",
        test_move.test_who_waits_longest_is_noted_by_acceptance,
    ),
    Mutant(
        "a sweep takes what was moved for young",
        "sweep",
        "meta_fields(meta or '') or match",
        "match",
        test_move.test_a_sweep_knows_when_what_was_moved_was_accepted,
    ),
]
MUTANTS: list[Mutant] = [*SUBMIT, *START, *RUN, *GIVE_UP, *SWEEP, *TENANTS, *BILLS, *MOVE]

EQUIVALENT: list[Mutant] = [
    # Whenever the epoch rises but by a start, the work gets another entry and so another place; and a start
    # leaves it with its owner. The check stays all the same: with another way of taking work it would count.
    Mutant(
        "a renewal without the epoch",
        "renew",
        FENCE,
        "and match(record, '^R%d+|%d+(|[^|]*|[^|]*|)') == match(fence, '^|%d+(|[^|]*|[^|]*|)$')",
        test_leases.test_what_another_took_is_lost_and_stays_with_it,
    ),
]
"""Faults that can make no difference, each with a test that passes in spite of it."""


CLIENT: dict[str, Test] = {
    "library retry on": test_lost_replies.test_a_lost_reply_of_read_is_an_error_and_never_repeated,
    "ignore_subscribe_messages": test_subscriber.test_a_killed_connection_is_made_anew_and_all_are_told,
    "groups are made at $": test_read.test_what_was_submitted_before_the_groups_is_read,
}
"""Faults in what calls Redis, not in a script; see `test_client_mutants.py`."""


def witness(test: Test) -> str:
    """The name of a test and its file."""
    return f"{test.__module__.rpartition('.')[2]}.{test.__name__}"


def table() -> str:
    """What notices which fault."""
    rows = [f"| {one.name} | `{one.script}` | `{one.witness}` |" for one in MUTANTS]
    rows += [f"| {name} | Python | `{witness(test)}` |" for name, test in CLIENT.items()]
    return "\n".join(["| fault | script | noticed by |", "| --- | --- | --- |", *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(table())
