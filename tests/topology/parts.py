"""Small parts of the tests of durability."""

from __future__ import annotations

from streamfleet_common.broker import Broker
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.submissions import Submission


async def outcome(broker: Broker, submission: Submission) -> str:
    """What becomes of a submission, or why it was refused."""
    try:
        (answer,) = await broker.submit([submission])
    except BrokerUnavailable as error:
        return str(error.reason)
    return answer.outcome
