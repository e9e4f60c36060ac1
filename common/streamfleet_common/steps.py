"""What the steps of the protocol stand on: one shard of one queue, its names, and the way to call."""

from __future__ import annotations

from streamfleet_common.calls import Calls
from streamfleet_common.connections import Connections
from streamfleet_common.keys import Keys
from streamfleet_common.settings import Durability


class Steps:
    """The base of `Broker`'s parts."""

    def __init__(
        self,
        connections: Connections,
        queue: str,
        *,
        shard: int = 0,
        script_flags: bool = True,
        durability: Durability = "fast",
    ) -> None:
        self.keys = Keys(queue, shard)
        self._connections = connections
        self._commands = connections.commands
        self._calls = Calls(connections, self.keys.tag, script_flags=script_flags, durability=durability)
