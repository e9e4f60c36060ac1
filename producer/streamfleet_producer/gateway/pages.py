"""Pages for people: the fleet as it is now, with a box for a prompt, and the interface.

They load nothing from elsewhere, and run only what lies beside them.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.resources import files

from starlette.responses import Response

from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.description import described
from streamfleet_producer.gateway.dialects import json_response
from streamfleet_producer.gateway.operation import Operation
from streamfleet_producer.gateway.refusals import NoSuchPath

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # What a model says is shown as text; should that ever fail, the browser still runs nothing of it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_NAMES = ("fleet.html", "docs.html", "fleet.js", "docs.js", "style.css")


@cache
def _page(name: str) -> bytes:
    return files(__package__).joinpath("static", name).read_bytes()


def _answer(name: str) -> Response:
    kind = _TYPES[name[name.rindex(".") :]]
    return Response(_page(name), headers=_HEADERS, media_type=f"{kind}; charset=utf-8")


async def fleet_page(_call: Call[None]) -> Response:
    """Queues, workers, and a prompt."""
    return _answer("fleet.html")


async def docs_page(_call: Call[None]) -> Response:
    """The interface."""
    return _answer("docs.html")


async def page_part(call: Call[None]) -> Response:
    """What the pages load. Raises NoSuchPath."""
    name = call.http.path_params["name"]
    if name not in _NAMES:
        raise NoSuchPath("no such page: /docs shows what there is")
    return _answer(name)


async def openapi(call: Call[None]) -> Response:
    """The interface, for programs."""
    return json_response(described(call.http.app.state.operations, version("streamfleet")))


OPERATIONS = (
    Operation(
        *("GET", "/", fleet_page, "The fleet, as a page.", "pages"), answer_type="text/html", public=True
    ),
    Operation(
        *("GET", "/docs", docs_page, "The interface, as a page.", "pages"),
        answer_type="text/html",
        public=True,
    ),
    Operation(
        *("GET", "/openapi.json", openapi, "This description.", "pages"),
        answer_type="application/json",
        public=True,
    ),
    Operation("GET", "/static/{name}", page_part, "What the pages load.", "pages", public=True, hidden=True),
)
