"""Whether a server keeps what a level of durability promises, asked of the server itself before work begins.

* `fast`: what was accepted outlives a restart, but for the last second or two before a crash.
* `safe`: what was accepted is on the server's disk; it is lost only with the disk, or in a failover.
* `replicated`: what was accepted is held by a replica too, and so outlives the server.

Where the server's settings may not be asked (managed servers and careful ACLs forbid CONFIG), the findings
say so; a submit at `safe` or `replicated` proves itself by its own wait in any case (`confirmation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from streamfleet_common.calls import Calls
from streamfleet_common.connections import Connections
from streamfleet_common.settings import Durability

OLDEST = (7, 0)
MAX_PUBSUB_BUFFER_BYTES = 32 * 1024 * 1024
"""What one stuck subscriber may take of the server's memory before it is cut off."""
MAX_LAG_S = 10
SETTINGS = (
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "client-output-buffer-limit",
    "min-replicas-to-write",
    "min-replicas-max-lag",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a server. `refuse`: the level cannot be kept; `warn`: a weakness, or not to be seen.

    `setting` names what it is about, as the server calls it; `words` say what is wrong and how to mend it.
    """

    severity: Literal["refuse", "warn"]
    setting: str
    words: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server told: the fields of INFO, and those settings it would show; None where it would not."""

    info: Mapping[str, str]
    config: Mapping[str, str] | None
    waits: bool | None = None
    """Whether WAIT and WAITAOF, as far as the level needs one, may be used."""

    @property
    def replicas(self) -> int:
        """Replicas that are connected and in step."""
        states = [value for key, value in self.info.items() if key.removeprefix("slave").isdigit()]
        return sum("state=online" in state for state in states)

    @property
    def version(self) -> tuple[int, ...]:
        parts = self.info.get("redis_version", "").split(".")
        return tuple(int(part) for part in parts if part.isdigit())


async def check(connections: Connections, level: Durability) -> list[Finding]:
    """What the server lacks for `level`, the gravest first; empty where all is well.

    Raises:
        BrokerUnavailable: the server cannot be asked at all.
    """
    return judge(await ask(connections, level), level)


async def ask(connections: Connections, level: Durability) -> Facts:
    """Ask the server what `judge` wants to know."""
    calls = Calls(connections, "")
    redis: Any = connections.commands
    await calls.ask(redis.ping)
    info = await calls.permitted(redis.info) or {}
    shown = await calls.permitted(lambda: redis.config_get(*SETTINGS))
    probe = {"fast": None, "safe": ("WAITAOF", 0, 0, 1), "replicated": ("WAIT", 0, 1)}[level]
    waits = None
    if probe is not None:
        waits = await calls.permitted(lambda: redis.execute_command(*probe)) is not None
    config = None if shown is None else {_text(key): _text(value) for key, value in shown.items()}
    return Facts({key: _info(value) for key, value in info.items()}, config, waits)


def judge(facts: Facts, level: Durability) -> list[Finding]:
    """What these facts mean for `level`, the gravest first."""
    findings = [*_server(facts), *_memory(facts, level), *_disk(facts, level), *_replicas(facts, level)]
    unseen = [*(["INFO"] if not facts.info else []), *(["CONFIG GET"] if facts.config is None else [])]
    if unseen:
        findings.append(
            Finding(
                "warn",
                "acl",
                f"this user may not run {' and '.join(unseen)}, so not all could be checked: "
                f"grant it, or see for yourself that the server is set up for {level!r}",
            )
        )
    return sorted(findings, key=lambda finding: finding.severity == "warn")


def _server(facts: Facts) -> list[Finding]:
    findings = []
    if facts.version and facts.version < OLDEST:
        findings.append(
            Finding(
                "refuse", "redis_version", "the server is older than Redis 7.0, and knows no script flags"
            )
        )
    if facts.info.get("role", "master") != "master":
        findings.append(Finding("refuse", "role", "the server is a replica: point the URL at the primary"))
    if facts.info.get("cluster_enabled") == "1":
        findings.append(
            Finding(
                "warn",
                "cluster_enabled",
                "the server is a node of a cluster: this works only while it alone holds all slots",
            )
        )
    return findings


def _memory(facts: Facts, level: Durability) -> list[Finding]:
    findings = []
    policy = facts.info.get("maxmemory_policy", "noeviction")
    is_limited = facts.info.get("maxmemory", "0") != "0"
    mend = f"maxmemory-policy is {policy}: set it to noeviction"
    if policy.startswith("allkeys"):
        # A lane is one key: the whole of it would go at once, and nobody would be told.
        what = "evicts whole queues" if is_limited else "would evict whole queues once maxmemory is set"
        findings.append(
            Finding("refuse" if is_limited else "warn", "maxmemory-policy", f"the server {what}; {mend}")
        )
    elif policy.startswith("volatile"):
        # What has a life of its own: the results and logs of what has ended, not the work.
        what = "evicts results before their time" if is_limited else "would evict results if maxmemory is set"
        severity: Literal["refuse", "warn"] = "refuse" if is_limited and level != "fast" else "warn"
        findings.append(Finding(severity, "maxmemory-policy", f"the server {what}; {mend}"))
    limits = (facts.config or {}).get("client-output-buffer-limit", "").split()
    if "pubsub" in limits:
        hard = int(limits[limits.index("pubsub") + 1])
        if not 0 < hard <= MAX_PUBSUB_BUFFER_BYTES:
            share = f"{hard:,} bytes" if hard else "all"
            findings.append(
                Finding(
                    "warn",
                    "client-output-buffer-limit",
                    f"a stuck subscriber may take {share} of the server's memory: "
                    "CONFIG SET client-output-buffer-limit 'pubsub 8mb 2mb 10'",
                )
            )
    return findings


def _disk(facts: Facts, level: Durability) -> list[Finding]:
    findings = []
    grave: Literal["refuse", "warn"] = "refuse" if level == "safe" else "warn"
    if facts.info.get("aof_enabled") == "0":
        findings.append(
            Finding(
                grave,
                "appendonly",
                "appendonly is off: a restart of the server loses what was accepted since its last snapshot, "
                "or all; CONFIG SET appendonly yes",
            )
        )
        return findings
    if facts.info.get("aof_last_write_status", "ok") != "ok":
        findings.append(
            Finding(
                grave,
                "aof_last_write_status",
                "the server cannot write its append-only file: look into its log",
            )
        )
    config = facts.config or {}
    fsync = config.get("appendfsync", "")
    if fsync == "no":
        findings.append(
            Finding(
                grave,
                "appendfsync",
                "appendfsync is no: what is on disk is left to the system, up to half a minute late; "
                f"CONFIG SET appendfsync {'always' if level == 'safe' else 'everysec'}",
            )
        )
    elif level == "safe":
        findings += _safe_fsync(fsync, config.get("no-appendfsync-on-rewrite", "no"), waits=bool(facts.waits))
    return findings


def _safe_fsync(fsync: str, off_on_rewrite: str, *, waits: bool) -> list[Finding]:
    if waits:
        if fsync != "everysec":
            return []
        return [
            Finding(
                "warn",
                "appendfsync",
                "appendfsync is everysec: each submit waits up to a second for its fsync; "
                "CONFIG SET appendfsync always is quicker",
            )
        ]
    if fsync == "always" and off_on_rewrite == "no":
        return []
    if fsync == "always":
        return [
            Finding(
                "refuse",
                "no-appendfsync-on-rewrite",
                "no-appendfsync-on-rewrite is yes: nothing is synced while the file is rewritten; "
                "set it to no",
            )
        ]
    return [
        Finding(
            "refuse",
            "waitaof",
            "the server has no WAITAOF for this user: take Redis 7.2 or any Valkey and grant it, "
            "or CONFIG SET appendfsync always",
        )
    ]


def _replicas(facts: Facts, level: Durability) -> list[Finding]:
    if level != "replicated":
        return []
    findings = []
    if not facts.waits:
        findings.append(
            Finding("refuse", "wait", "this user may not run WAIT, which proves a replica: grant it")
        )
    if facts.info and not facts.replicas:
        findings.append(
            Finding("refuse", "connected_slaves", "no replica is in step: nothing could be accepted; add one")
        )
    config = facts.config or {}
    if config.get("min-replicas-to-write") == "0":
        # The wait keeps what was accepted; this keeps a primary that is cut off from serving workers.
        findings.append(
            Finding(
                "warn",
                "min-replicas-to-write",
                "min-replicas-to-write is 0: a primary that is cut off goes on giving out work "
                "which the new one gives out too; CONFIG SET min-replicas-to-write 1",
            )
        )
    elif int(config.get("min-replicas-max-lag", "0")) > MAX_LAG_S:
        findings.append(
            Finding(
                "warn",
                "min-replicas-max-lag",
                f"a primary that is cut off takes writes for {config['min-replicas-max-lag']} s more; "
                f"CONFIG SET min-replicas-max-lag {MAX_LAG_S}",
            )
        )
    return findings


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _info(value: Any) -> str:
    # The library makes a dict of what is a list of pairs.
    if isinstance(value, dict):
        return ",".join(f"{key}={part}" for key, part in value.items())
    return str(value)
