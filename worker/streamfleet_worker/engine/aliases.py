"""Names an operator gives to models, in a TOML file.

::

    [aliases.chat]
    reference = "hf://organisation/name@revision"
    precision = "bfloat16"
    device = "cuda:0"
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from streamfleet_common.errors import ModelLoadFailed


@dataclass(frozen=True, slots=True)
class Alias:
    """What a name stands for."""

    reference: str
    device: str = "auto"
    precision: str = "auto"


KEYS = tuple(field.name for field in fields(Alias))


def resolve(reference: str, device: str, precision: str, file: Path | None) -> Alias:
    """What to load, where and how, once the aliases of a file are applied.

    An alias may name another one. Of device and precision what is asked for here counts, then the first
    alias that says something, unless it is "auto".

    Args:
        reference: an alias of the file, or anything else, which stays as it is.
        device: as asked for.
        precision: as asked for.
        file: the operator's file; without one, nothing is an alias.

    Raises:
        ModelLoadFailed: the file is not as it must be, or the alias leads back to itself.
    """
    known = read_aliases(file) if file is not None else {}
    found, passed = Alias(reference, device, precision), [reference]
    while (alias := known.get(found.reference)) is not None:
        found = Alias(
            alias.reference,
            alias.device if found.device == "auto" else found.device,
            alias.precision if found.precision == "auto" else found.precision,
        )
        if found.reference in passed:
            raise ModelLoadFailed(f"{file}: aliases in a circle: {' -> '.join([*passed, found.reference])}")
        passed.append(found.reference)
    return found


def read_aliases(file: Path) -> dict[str, Alias]:
    """The aliases of a file, by name; a path that begins with a dot is seen from the file's folder.

    Raises:
        ModelLoadFailed: the file cannot be read, or says something that is no alias; the place is named.
    """
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:  # a decoding error, of text or TOML, is a ValueError
        raise ModelLoadFailed(f"the aliases in {file} cannot be read: {error}") from error
    table = _only(file, "", content, ("aliases",)).get("aliases", {})
    if not isinstance(table, dict):
        raise ModelLoadFailed(f"{file}: aliases must be a table: [aliases.<name>]")
    return {name: _alias(file, f"aliases.{name}", entry) for name, entry in table.items()}


def _alias(file: Path, place: str, entry: Any) -> Alias:
    if not isinstance(entry, dict):
        raise ModelLoadFailed(f"{file}: {place} must be a table, with a reference")
    values = _only(file, f"{place}.", entry, KEYS)
    for key, value in values.items():
        if not isinstance(value, str) or not value:
            raise ModelLoadFailed(f"{file}: {place}.{key} must be a text, not {value!r}")
    if "reference" not in values:
        raise ModelLoadFailed(f"{file}: {place} has no reference")
    alias = Alias(**values)
    if alias.reference.startswith(("./", "../")):
        return replace(alias, reference=str((file.parent / alias.reference).resolve()))
    return alias


def _only(file: Path, place: str, table: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    for key in table:
        if key not in keys:
            raise ModelLoadFailed(f"{file}: {place}{key} is not known: there is {', '.join(keys)}")
    return table
