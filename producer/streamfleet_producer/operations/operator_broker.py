"""The broker, with the steps that operators alone need."""

from __future__ import annotations

from streamfleet_common.broker import Broker
from streamfleet_common.control import ControlSteps
from streamfleet_common.dead_letters import DeadLetters
from streamfleet_common.flight_steps import FlightSteps


class OperatorBroker(Broker, ControlSteps, DeadLetters, FlightSteps):
    """A broker that pauses, drains, looks after dead letters and into one request, too."""
