"""The broker, with the dead letters of its queue."""

from __future__ import annotations

from streamfleet_common.broker import Broker
from streamfleet_common.dead_letters import DeadLetters


class DeadBroker(Broker, DeadLetters):
    """A broker that reads, drops and trims dead letters too: operators need that, requests do not."""
