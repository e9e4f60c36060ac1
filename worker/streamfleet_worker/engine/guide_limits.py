"""What a form may ask for, so that the library that follows it keeps to it in a bounded time.

The library counts most of its own work and stops. It does not count what is refused here: each limit stands
for a form that held it up for seconds, or for ever.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from streamfleet_common.errors import InvalidRequest, Unsupported

MAX_WEIGHT = 1_000_000
"""Of all regular expressions of a form together; see `weight`."""
MAX_MULTIPLE = 10_000
"""The least common multiple of all `multipleOf`, as integers of the same decimal place."""
MAX_OPTIONAL = 50
"""Properties in a schema that has `minProperties` 1."""
MAX_PATTERN_PROPERTIES = 16

# Names are bounded: one that never ends, begun again and again, would be looked through each time.
_PIECE = re.compile(
    r"""
      \\(?:[pPxuU]\{[^}]{0,99}\}|[pP].|.)  # an escape
    | (?P<set>\[)
    | (?P<open>\((?:\?(?:P?<[^>]{0,99}>|(?P<flags>[a-zA-Z-]*)(?P<alone>\))?:?))?)
    | (?P<close>\))
    | \{0*(?P<least>\d{1,12})(?:,0*(?P<most>\d{0,12}))?\}
    | (?P<few>[*+?])
    | .
    """,
    re.DOTALL | re.VERBOSE,
)
# The first bracket of a set may be one of its characters.
_IN_SET = re.compile(r"(?P<open>\[\^?\]?)|(?P<close>\])|\\.|.", re.DOTALL)


def weight(regex: str) -> int:
    """How dear a regular expression may be to follow: (1 + repeated) x expanded.

    Expanded is its length in characters and sets once every counted repetition is written out. Repeated is
    the part of this length that stands in groups with a count, and 1 for anything else that is repeated. So
    `.{0,4000}` weighs little, and `(a{1,100}){1,100}` too much.

    Raises:
        Unsupported: it is in verbose mode.
    """
    groups = [(0, 0)]
    """What is expanded and repeated of each open group, its last piece not yet among it."""
    size = cost = 0
    """Of this last piece, which a quantifier may still repeat."""
    is_single = False
    at = 0
    while match := _PIECE.match(regex, at):
        at = match.end()
        if match["few"]:
            cost, is_single = cost + 1, False
            continue
        if match["least"]:
            times = max(1, int(match["most"] or match["least"]))
            size *= times
            cost, is_single = 1 if is_single else size, False
            continue
        groups[-1] = (groups[-1][0] + size, groups[-1][1] + cost)
        size, cost, is_single = 0, 0, False
        if match["open"]:
            if "x" in (match["flags"] or ""):
                raise Unsupported(
                    "regular expressions in verbose mode, `(?x)`, are not read here: leave the spaces out",
                    feature="verbose mode",
                )
            if not match["alone"]:
                groups.append((0, 0))
        elif match["close"]:
            # One too many is the library's to tell.
            size, cost = groups.pop() if len(groups) > 1 else (0, 0)
        else:
            size, is_single = 1, True
            at = _end_of_set(regex, at) if match["set"] else at
    expanded = size + sum(group[0] for group in groups)
    return (1 + cost + sum(group[1] for group in groups)) * expanded


def _end_of_set(regex: str, at: int) -> int:
    """Where a set of characters ends that began before `at`; sets may hold sets."""
    if first := re.compile(r"\^?\]?").match(regex, at):
        at = first.end()
    depth = 1
    while depth and (match := _IN_SET.match(regex, at)):
        depth += bool(match["open"]) - bool(match["close"])
        at = match.end()
    return at


def check_regex(regex: str) -> None:
    """Refuse a regular expression that is too dear.

    Raises:
        InvalidRequest: it is; Unsupported among them: it is in verbose mode.
    """
    if (found := weight(regex)) > MAX_WEIGHT:
        raise _too_much("regex", "repetitions within and beside repetitions", found, MAX_WEIGHT)


def check_schema(schema: Any) -> None:
    """Refuse a JSON schema that is too dear; keywords are counted wherever they stand.

    Raises:
        InvalidRequest: it is; Unsupported among them: a pattern is in verbose mode, or bounds are not kept.
    """
    multiples: list[Decimal] = []
    patterns: list[str] = []
    properties = pattern_properties = 0
    some_property = ""
    for place, key, value in (("", "", schema), *walk(schema)):
        if isinstance(value, dict):
            _check_zero(place, value)
            properties += len(value) * (key == "properties")
            if key == "patternProperties":
                patterns += value
                pattern_properties += len(value)
        elif key == "pattern" and isinstance(value, str):
            patterns.append(value)
        elif key == "minProperties" and value == 1:
            some_property = place
        elif key == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
            multiples.append(Decimal(str(value)))
    if pattern_properties > MAX_PATTERN_PROPERTIES:
        raise _too_much("json_schema", "patternProperties", pattern_properties, MAX_PATTERN_PROPERTIES)
    if some_property and properties > MAX_OPTIONAL:
        what = f"properties beside minProperties 1 at {some_property}"
        raise _too_much("json_schema", what, properties, MAX_OPTIONAL)
    if (multiple := _common_multiple(multiples)) > MAX_MULTIPLE:
        raise _too_much("json_schema", "multipleOf, the least common multiple", multiple, MAX_MULTIPLE)
    if (found := sum(map(weight, patterns))) > MAX_WEIGHT:
        what = "patterns with repetitions within and beside repetitions"
        raise _too_much("json_schema", what, found, MAX_WEIGHT)


def _check_zero(place: str, schema: dict[str, Any]) -> None:
    # The library takes 0 for greater than 0 where the other bound is nearer to it than 1.
    bounds = {key: schema.get(key) for key in ("exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum")}
    zeros = [key for key in bounds if key.startswith("e") and bounds[key] == 0 and bounds[key] is not False]
    if zeros and any(isinstance(bound, float) and 0 < abs(bound) < 1 for bound in bounds.values()):
        feature = f"{zeros[0]} 0 beside a bound between -1 and 1"
        raise Unsupported(
            f"guide.json_schema{place}/{zeros[0]}: {feature} cannot be followed", feature=feature
        )


def walk(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Every value in a schema with its JSON pointer and its key; the outer ones first."""
    waiting = deque([("", schema)])
    while waiting:
        place, node = waiting.popleft()
        parts = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in parts:
            inner = f"{place}/{str(key).replace('~', '~0').replace('/', '~1')}"
            yield inner, str(key), value
            waiting.append((inner, value))


def _common_multiple(values: list[Decimal]) -> int:
    if any(abs(value.adjusted()) > 300 for value in values if value):
        return 10**300
    places = max((-int(value.as_tuple().exponent) for value in values), default=0)
    return math.lcm(*(abs(int(value.scaleb(max(places, 0)))) for value in values if value))


def _too_much(field: str, what: str, found: int, limit: int) -> InvalidRequest:
    count = str(found) if found < 10**12 else "more than a million millions"
    return InvalidRequest(
        f"guide.{field} is too complex to be followed: {what}: {count}, where at most {limit} are allowed",
        limit=limit,
    )
