"""What a service tests itself with: a fleet in memory that answers as it is told. See docs/testing.md."""

from streamfleet_producer.testing.script import ANYTHING, NEVER, Lost, Rule, Wait
from streamfleet_producer.testing.scripted_client import BlockingScriptedClient, ScriptedClient
from streamfleet_producer.testing.scripted_fleet import Asked, ScriptedFleet

__all__ = [
    "ANYTHING",
    "NEVER",
    "Asked",
    "BlockingScriptedClient",
    "Lost",
    "Rule",
    "ScriptedClient",
    "ScriptedFleet",
    "Wait",
]
