"""The broker, with the steps that operators alone need."""

from __future__ import annotations

from streamfleet_common.broker import Broker
from streamfleet_common.control import ControlSteps
from streamfleet_common.dead_letters import DeadLetters


class OperatorBroker(Broker, ControlSteps, DeadLetters):
    """A broker that pauses, drains and looks after dead letters too."""
