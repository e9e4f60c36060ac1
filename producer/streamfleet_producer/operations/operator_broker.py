"""The broker, with the steps that operators alone need."""

from __future__ import annotations

from streamfleet_common.control import ControlSteps
from streamfleet_common.flight_steps import FlightSteps
from streamfleet_producer.bulk.dead_broker import DeadBroker


class OperatorBroker(DeadBroker, ControlSteps, FlightSteps):
    """A broker that pauses, drains, looks after dead letters and into one request, too."""
