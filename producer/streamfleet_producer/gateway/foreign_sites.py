"""Pages of other sites, which a browser lets speak to whatever it can reach, this machine too.

A key is something that no such page has. Where none is asked for, two ways are closed here: a page that
sends a form to us without being able to read the answer, and one whose name its owner points at our address,
so that the browser takes us for its own site.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from streamfleet_producer.gateway.refusals import ForeignSite


def check_site(headers: Mapping[str, str], names: Collection[str]) -> None:
    """Refuse what a page of another site has sent; `names` are those that this gateway goes by.

    An address, a name without dots and one that ends in `.localhost` are nobody else's. Programs send no
    `Origin`, and are held to the name alone.

    Raises:
        ForeignSite: it was another site's.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    name = _name(f"//{host}")
    if host and not (_is_ours(name) or name in {known.lower() for known in names}):
        raise ForeignSite(
            f"this gateway asks for no keys, and then answers to no name that others may have made up "
            f"({name[:80] or 'none'}): use its address, name it in STREAMFLEET_GATEWAY_NAMES, or set "
            "STREAMFLEET_KEYS_FILE"
        )
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        raise ForeignSite("this gateway asks for no keys, and then takes nothing from pages of other sites")


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_ours(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name != "" and ("." not in name or name.endswith(".localhost"))
    return True
