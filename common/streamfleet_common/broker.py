"""The one seam to Redis: a method per step of the protocol, each one script call for a whole batch.

Every script reads and checks all before it writes and may be repeated without harm, so a call whose reply
was lost is made again.
"""

from __future__ import annotations

from streamfleet_common.backlog import Backlogs
from streamfleet_common.batch_notes import BatchNotes
from streamfleet_common.housekeeping import Housekeeping
from streamfleet_common.moves import MoveSteps
from streamfleet_common.producer_steps import ProducerSteps
from streamfleet_common.tenant_steps import TenantSteps
from streamfleet_common.worker_steps import WorkerSteps


class Broker(ProducerSteps, WorkerSteps, Housekeeping, Backlogs, TenantSteps, MoveSteps, BatchNotes):
    """One shard of one queue in Redis; safe for concurrent use by coroutines of one event loop.

    Raises:
        BrokerUnavailable: by every method, when Redis cannot be reached or refuses to work. Scripts and plain
            questions are repeated for `calls.BUDGET_S` seconds before that.
    """
