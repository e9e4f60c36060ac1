"""Which queue a request was given to, where nobody says."""

from __future__ import annotations

from collections.abc import Sequence

from streamfleet_common.errors import InvalidRequest, RequestNotFound
from streamfleet_producer.intake import checked
from streamfleet_producer.names import listed
from streamfleet_producer.operations.operator_broker import OperatorBroker

MOST_QUEUES = 1000
"""So many are looked at, in one round trip of a byte each."""


async def queue_of(broker: OperatorBroker, rid: str, queues: Sequence[str]) -> str:
    """The one of these queues that has a record of a request.

    Raises:
        RequestNotFound: none of those that were looked at has one.
        InvalidRequest: several have one.
        BrokerUnavailable: Redis cannot be reached.
    """
    some = queues[:MOST_QUEUES]
    found, refused = await broker.queues_knowing(checked(rid), some)
    if len(found) > 1:
        raise InvalidRequest(
            f"several queues know a request {rid}: choose one with --queue ({listed(found)})"
        )
    if found:
        return found[0]
    looked = len(some) - len(refused)
    words = [
        f"none of {looked} queues knows a request {rid}: it was never accepted, or its result has expired"
    ]
    if refused:
        words.append(f"this user of Redis may not look into {len(refused)} more")
    if len(queues) > len(some):
        words.append(f"{len(queues) - len(some)} more were not looked at: name its own with --queue")
    raise RequestNotFound("; ".join(words))
