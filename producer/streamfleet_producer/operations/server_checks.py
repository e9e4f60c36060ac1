"""Checks of the server, each a small function of what the server told."""

from __future__ import annotations

from collections.abc import Callable

from streamfleet_common import durability
from streamfleet_common.durability import Finding
from streamfleet_producer.operations.checkup import Check, Level, seconds, size
from streamfleet_producer.operations.server_facts import ServerFacts

FAR_MS, SLOW_MS = 5.0, 100.0
"""PING at the median and at the 99th percentile from which on it is said."""
CROWDED = 0.8
"""Share of `maxmemory` from which on workers let submissions be refused."""
FILLING = 0.65
MAX_SKEW_S = 1.0
SLOW_CALL_MS, LATELY_S = 100.0, 600.0
OLDEST_VALKEY = (8,)
AVOIDED_BYTES = 1024 * 1024
"""From this size of reply on, Valkey 9 may forget to count what a stuck subscriber holds."""
NO_RIGHT = "this user may not ask"

_MENDS = {
    "maxmemory-policy": "redis-cli CONFIG SET maxmemory-policy noeviction",
    "client-output-buffer-limit": "redis-cli CONFIG SET client-output-buffer-limit 'pubsub 8mb 2mb 10'",
    "appendonly": "redis-cli CONFIG SET appendonly yes",
    "aof_last_write_status": "look into the log of the server: its disk may be full",
    "no-appendfsync-on-rewrite": "redis-cli CONFIG SET no-appendfsync-on-rewrite no",
    "waitaof": "redis-cli CONFIG SET appendfsync always, or ACL SETUSER USER +waitaof",
    "wait": "redis-cli ACL SETUSER USER +wait",
    "connected_slaves": "on another server: redis-cli REPLICAOF HOST PORT",
    "min-replicas-to-write": "redis-cli CONFIG SET min-replicas-to-write 1",
    "min-replicas-max-lag": f"redis-cli CONFIG SET min-replicas-max-lag {durability.MAX_LAG_S}",
}


def check_server(server: ServerFacts) -> list[Check]:
    """All of them."""
    checks: tuple[Callable[[ServerFacts], Check | None], ...] = (
        latency,
        version,
        role,
        cluster,
        memory_limit,
        memory_used,
        policy,
        disk,
        replicas,
        subscribers,
        copies,
        keepalive,
        idle,
        clients,
        clock,
        user,
        slow_calls,
    )
    return [found for check in checks if (found := check(server)) is not None]


def _check(name: str, level: Level, words: str, mend: str = "") -> Check:
    return Check("server", name, level, words, mend)


def latency(server: ServerFacts) -> Check:
    """How long a round trip takes: a batch costs several."""
    pings = server.ping_ms
    median, late = pings[len(pings) // 2], pings[int(len(pings) * 0.99)]
    words = f"PING takes {median:.1f} ms, and {late:.1f} ms at the 99th percentile of {len(pings)}"
    if median > FAR_MS:
        return _check(
            "latency", "warning", f"{words}: it is far away", "run workers and gateways beside the server"
        )
    if late > SLOW_MS:
        return _check(
            "latency",
            "warning",
            f"{words}: something holds it up",
            "redis-cli --latency-history, SLOWLOG GET",
        )
    return _check("latency", "ok", words)


def version(server: ServerFacts) -> Check:
    """Redis 7.0 or newer, Valkey 8 or newer."""
    valkey = server.info.get("valkey_version", "")
    name, number, oldest = (
        ("Valkey", valkey, OLDEST_VALKEY)
        if valkey
        else ("Redis", server.info.get("redis_version", ""), durability.OLDEST)
    )
    if not number:
        return _unseen("version", "INFO")
    parts = tuple(int(part) for part in number.split(".") if part.isdigit())
    if parts < oldest:
        wanted = ".".join(map(str, oldest))
        return _check(
            "version",
            "fault",
            f"{name} {number} is older than {wanted}, the oldest that is known to work",
            f"upgrade to {name} {wanted} or newer",
        )
    return _check("version", "ok", f"{name} {number}")


def role(server: ServerFacts) -> Check:
    """Only a primary takes writes."""
    found = server.info.get("role")
    if found is None:
        return _unseen("role", "INFO")
    if found != "master":
        host, port = server.info.get("master_host", "HOST"), server.info.get("master_port", "PORT")
        return _check(
            "role",
            "fault",
            "it is a replica, which takes no writes",
            f"STREAMFLEET_REDIS_URL=redis://{host}:{port}/0",
        )
    return _check("role", "ok", "it is the primary")


def cluster(server: ServerFacts) -> Check | None:
    """A queue's names are spread over slots: one node must hold all."""
    enabled = server.info.get("cluster_enabled")
    if enabled != "1":
        return None if enabled is None else _check("cluster", "ok", "it is a server of its own")
    found = server.cluster
    if found is None:
        return _check("cluster", "unseen", f"a node of a cluster; {NO_RIGHT} whether it holds all slots")
    if found.get("cluster_size") == "1" and found.get("cluster_slots_ok") == "16384":
        return _check(
            "cluster",
            "warning",
            "a node of a cluster: this works only while it alone holds all slots",
            "take a server that is no node of a cluster, or one that Sentinel watches",
        )
    return _check(
        "cluster",
        "fault",
        "a node of a cluster that does not hold all slots itself: names of a queue lie elsewhere",
        "take a server that is no node of a cluster, or one that Sentinel watches",
    )


def memory_limit(server: ServerFacts) -> Check:
    """Without a limit the system ends the server when memory is out."""
    limit = server.number("maxmemory")
    if limit is None:
        return _unseen("memory limit", "INFO")
    if limit:
        return _check("memory limit", "ok", f"maxmemory is {size(limit)}")
    total = server.number("total_system_memory") or 0.0
    wanted = f"{max(1, int(total * 0.6) >> 20)}mb" if total else "BYTES"
    return _check(
        "memory limit",
        "warning",
        "maxmemory is not set: where memory runs out the system ends the server",
        f"redis-cli CONFIG SET maxmemory {wanted}",
    )


def memory_used(server: ServerFacts) -> Check:
    """How full it is."""
    used, limit = server.number("used_memory"), server.number("maxmemory")
    if used is None:
        return _unseen("memory used", "INFO")
    if not limit:
        return _check("memory used", "ok", f"{size(used)} are used")
    share = used / limit
    words = f"{size(used)}, {share:.0%} of maxmemory, are used"
    mend = "raise maxmemory, shorten result_ttl, or add workers"
    if share >= 1:
        return _check("memory used", "fault", f"{words}: it refuses new requests", mend)
    if share >= CROWDED:
        return _check("memory used", "fault", f"{words}: workers let new requests be refused", mend)
    return _check(
        "memory used", "warning" if share >= FILLING else "ok", words, mend if share >= FILLING else ""
    )


def policy(server: ServerFacts) -> Check:
    """`noeviction` is not optional."""
    if "maxmemory_policy" not in server.info:
        return _unseen("policy", "INFO")
    evicted = server.number("evicted_keys") or 0
    good = f"maxmemory-policy is {server.info['maxmemory_policy']}"
    found = _found(server, "policy", {"maxmemory-policy"}, good)
    if found.level == "ok" and evicted:
        return _check(
            "policy",
            "warning",
            f"{good}, but {evicted:,.0f} keys were evicted since the start of the server",
            "redis-cli CONFIG RESETSTAT, once you know whose they were",
        )
    return found


def disk(server: ServerFacts) -> Check:
    """Whether what was accepted outlives a restart, as `durability` asks."""
    names = {"appendonly", "aof_last_write_status", "appendfsync", "no-appendfsync-on-rewrite", "waitaof"}
    if "aof_enabled" not in server.info:
        return _unseen("disk", "INFO")
    fsync = (server.facts.config or {}).get("appendfsync", "unknown: CONFIG GET is not granted")
    good = f"appendonly is on, appendfsync {fsync}: enough for durability {server.level!r}"
    return _found(server, "disk", names, good)


def replicas(server: ServerFacts) -> Check:
    """Replicas that are in step, as `replicated` asks."""
    count = server.facts.replicas
    words = f"{count} in step" if count else "none"
    lags = [
        int(part.partition("=")[2])
        for key, value in server.info.items()
        if key.removeprefix("slave").isdigit()
        for part in value.split(",")
        if part.startswith("lag=") and part.partition("=")[2].isdigit()
    ]
    if lags:
        words += f", {max(lags)} s behind at most"
    if server.level != "replicated":
        return _check("replicas", "ok", f"{words}; durability {server.level!r} needs none")
    names = {"wait", "connected_slaves", "min-replicas-to-write", "min-replicas-max-lag"}
    return _found(server, "replicas", names, words)


def subscribers(server: ServerFacts) -> Check:
    """What a reader that does not read may take of the server's memory."""
    if server.facts.config is None:
        return _unseen("subscribers", "CONFIG GET")
    return _found(server, "subscribers", {"client-output-buffer-limit"}, "one that is stuck is dropped")


def copies(server: ServerFacts) -> Check | None:
    """On Valkey 9 large replies are not counted against that limit, unless this setting says otherwise."""
    name = "min-string-size-avoid-copy-reply"
    found = (server.config or {}).get(name)
    if found is None or not found.isdigit():
        return None
    if 0 < int(found) < AVOIDED_BYTES:
        return _check(
            "copied replies",
            "warning",
            f"{name} is {found}: a subscriber that is stuck amid large messages is never dropped",
            f"redis-cli CONFIG SET {name} 1073741824",
        )
    return _check("copied replies", "ok", "all count against the limit of subscribers")


def keepalive(server: ServerFacts) -> Check:
    """How soon the server notices that a peer is gone."""
    found = (server.config or {}).get("tcp-keepalive", "")
    if not found.isdigit():
        return _unseen("keepalive", "CONFIG GET")
    if not 0 < int(found) <= 60:
        words = "is off" if found == "0" else f"is {found} s"
        return _check(
            "keepalive",
            "warning",
            f"tcp-keepalive {words}: connections of peers that are gone pile up",
            "redis-cli CONFIG SET tcp-keepalive 15",
        )
    return _check("keepalive", "ok", f"tcp-keepalive is {found} s")


def idle(server: ServerFacts) -> Check:
    """Whether the server closes connections that are silent."""
    found = (server.config or {}).get("timeout", "")
    if not found.isdigit():
        return _unseen("idle", "CONFIG GET")
    if found != "0":
        return _check(
            "idle",
            "warning",
            f"timeout is {found} s: connections that are silent for so long are closed, and made anew",
            "redis-cli CONFIG SET timeout 0",
        )
    return _check("idle", "ok", "silent connections stay open")


def clients(server: ServerFacts) -> Check:
    """How many connections there are, and may be."""
    connected = server.number("connected_clients")
    most = server.number("maxclients") or float((server.config or {}).get("maxclients", 0))
    if connected is None or not most:
        return _unseen("connections", "INFO")
    words = f"{connected:,.0f} of {most:,.0f}"
    if connected >= 0.8 * most:
        return _check(
            "connections",
            "warning",
            f"{words}: soon new ones are refused",
            f"redis-cli CONFIG SET maxclients {int(most) * 2}",
        )
    return _check("connections", "ok", words)


def clock(server: ServerFacts) -> Check:
    """The server's clock against ours."""
    ahead, unsure = server.ahead_s, server.unsure_s
    if abs(ahead) - unsure > MAX_SKEW_S:
        where = "ahead of" if ahead > 0 else "behind"
        return _check(
            "clock",
            "warning",
            f"it is {seconds(abs(ahead) * 1000)} {where} this machine's: times of answers are the server's",
            "on both machines: timedatectl set-ntp true",
        )
    return _check("clock", "ok", f"within {max(abs(ahead), unsure) * 1000:.0f} ms of this machine's")


def user(server: ServerFacts) -> Check:
    """Who we are, and whether anybody may be."""
    name = server.user or "unknown"
    if server.is_default_open:
        return _check(
            "user",
            "warning",
            f"we are {name!r}; 'default' needs no password: who reaches the port may do all",
            "streamfleet acl ROLE >> users.acl; see docs/security.md",
        )
    if server.user is None:
        return _unseen("user", "ACL WHOAMI")
    if server.is_default_open is None:
        return _check("user", "ok", f"we are {name!r}")
    return _check("user", "ok", f"we are {name!r}; 'default' is closed")


def slow_calls(server: ServerFacts) -> Check:
    """What held the server up lately."""
    if server.slow is None:
        return _unseen("slow calls", "SLOWLOG GET")
    found = [one for one in server.slow if one.took_ms >= SLOW_CALL_MS and one.ago_s <= LATELY_S]
    if found:
        worst = max(found, key=lambda one: one.took_ms)
        return _check(
            "slow calls",
            "warning",
            f"{len(found)} in the last {LATELY_S / 60:.0f} minutes; the longest, {worst.command}, "
            f"held everybody up for {worst.took_ms:,.0f} ms",
            "redis-cli SLOWLOG GET 10",
        )
    return _check(
        "slow calls", "ok", f"none over {SLOW_CALL_MS:.0f} ms in the last {LATELY_S / 60:.0f} minutes"
    )


def _found(server: ServerFacts, name: str, settings: set[str], good: str) -> Check:
    """The gravest of what `durability` finds about these settings."""
    findings = [one for one in durability.judge(server.facts, server.level) if one.setting in settings]
    if not findings:
        return _check(name, "ok", good)
    worst: Finding = findings[0]
    level: Level = "fault" if worst.severity == "refuse" else "warning"
    words = worst.words.partition("; CONFIG SET")[0].partition(": CONFIG SET")[0]
    mend = _MENDS.get(worst.setting, "")
    if worst.setting == "appendfsync":
        mend = f"redis-cli CONFIG SET appendfsync {'always' if server.level == 'safe' else 'everysec'}"
    return _check(name, level, words, mend)


def _unseen(name: str, command: str) -> Check:
    return _check(name, "unseen", f"{NO_RIGHT} ({command}): look for yourself, or grant it")
