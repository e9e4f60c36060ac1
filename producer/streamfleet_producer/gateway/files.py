"""OpenAI's files: what batches read, and what they answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive

from streamfleet_common.errors import InvalidRequest, RequestNotFound
from streamfleet_producer.gateway.call import Call, ClientGone
from streamfleet_producer.gateway.dialects import json_response
from streamfleet_producer.gateway.file_store import FileStore, StoredFile
from streamfleet_producer.gateway.operation import Operation, Parameter
from streamfleet_producer.gateway.refusals import BodyTooLarge

MAX_LIST = 10_000
COUNT = re.compile(r"\d{1,9}")
"""What `limit` may be: of more digits than some thousands Python makes no number."""
EXPIRY_S = range(3600, 30 * 86_400 + 1)
"""What a form may say of how long to keep its file, as OpenAI has it; seconds."""
_EXPIRY = ("expires_after[anchor]", "expires_after[seconds]")
_OVERHEAD = 64 * 1024
"""What a form has around its file; bytes."""

_T = TypeVar("_T")


class FileObject(BaseModel):
    """A file, in OpenAI's words."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(BaseModel):
    """Files, the newest first unless asked otherwise."""

    model_config = ConfigDict(frozen=True)

    object: Literal["list"]
    data: tuple[FileObject, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """That a file is gone."""

    model_config = ConfigDict(frozen=True)

    id: str
    object: Literal["file"]
    deleted: bool


def store_of(call: Call[Any]) -> FileStore:
    """The gateway's files. Raises RequestNotFound where it keeps none."""
    store = call.services.files
    if store is None:
        raise RequestNotFound(
            "this gateway keeps no files: start it with --files-dir (STREAMFLEET_FILES_DIR)"
        )
    return store


async def on_thread(step: Callable[..., _T], *args: Any) -> _T:
    """What may wait for a disk or for another server."""
    return await asyncio.to_thread(step, *args)


async def create_file(call: Call[None]) -> Response:
    """Keep an uploaded file. Raises InvalidRequest and BodyTooLarge."""
    store = store_of(call)
    kind = call.http.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise InvalidRequest("a form is wanted: send `file` and `purpose` as multipart/form-data")
    # The library bounds fields, not files.
    body = HttpRequest(call.http.scope, _Counted(call.receive, store.max_file_bytes + _OVERHEAD)).stream()
    parser = MultiPartParser(call.http.headers, body, max_files=1, max_fields=8, max_part_size=_OVERHEAD)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form cannot be read: {error.message}") from None
    except (KeyError, ValueError):
        raise InvalidRequest("the form cannot be read: it has no valid boundary") from None
    try:
        if unknown := sorted(form.keys() - {"file", "purpose", *_EXPIRY}):
            faults = [f"{name[:64]}: unknown field; it would have had no effect" for name in unknown]
            raise InvalidRequest(f"the form is not valid: {'; '.join(faults)}", problems=faults)
        upload, purpose = form.get("file"), form.get("purpose")
        if not isinstance(upload, UploadFile):
            raise InvalidRequest("file: a file is wanted")
        if purpose != "batch":
            raise InvalidRequest('purpose: "batch" is wanted; files serve nothing else here')
        ttl_s = _ttl_s(*map(form.get, _EXPIRY))
        upload.file.seek(0)
        keep = partial(store.add, call.tenant.name, upload.file, upload.filename or "file", ttl_s=ttl_s)
        file = await on_thread(keep)
    finally:
        await form.close()
    return json_response(_shown(file, upload.size or 0))


async def list_files(call: Call[None]) -> Response:
    """The tenant's files. Raises InvalidRequest."""
    store, query = store_of(call), call.http.query_params
    limit = query.get("limit", str(MAX_LIST))
    if not COUNT.fullmatch(limit) or not 1 <= int(limit) <= MAX_LIST:
        raise InvalidRequest(f"limit: 1 to {MAX_LIST} is wanted")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: asc or desc is wanted")
    found = await on_thread(store.list, call.tenant.name)
    if order == "asc":
        found.reverse()
    purpose, after = query.get("purpose"), query.get("after")
    if purpose is not None:
        found = [pair for pair in found if pair[0].purpose == purpose]
    if after is not None:
        ids = [file.id for file, _ in found]
        if after not in ids:
            raise RequestNotFound("after: no such file")
        found = found[ids.index(after) + 1 :]
    page = [_shown(file, _size(path)) for file, path in found[: int(limit)]]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(found) > len(page),
        }
    )


async def get_file(call: Call[None]) -> Response:
    """What a file is. Raises RequestNotFound."""
    file, path = await on_thread(store_of(call).get, call.tenant.name, call.http.path_params["file_id"])
    return json_response(_shown(file, _size(path)))


async def get_file_content(call: Call[None]) -> Response:
    """What it holds. Raises RequestNotFound."""
    file, path = await on_thread(store_of(call).get, call.tenant.name, call.http.path_params["file_id"])
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


async def delete_file(call: Call[None]) -> Response:
    """Remove it. Raises RequestNotFound."""
    id_ = call.http.path_params["file_id"]
    await on_thread(store_of(call).delete, call.tenant.name, id_)
    return json_response({"id": id_, "object": "file", "deleted": True})


def _ttl_s(anchor: object, seconds: object) -> int | None:
    """How long a form says that its file is to be kept; None if it does not."""
    if anchor is None and seconds is None:
        return None
    faults = []
    if anchor != "created_at":
        faults.append(f'{_EXPIRY[0]}: "created_at" is wanted')
    if not isinstance(seconds, str) or not COUNT.fullmatch(seconds) or int(seconds) not in EXPIRY_S:
        faults.append(f"{_EXPIRY[1]}: {EXPIRY_S[0]} to {EXPIRY_S[-1]} are wanted")
    if faults:
        raise InvalidRequest(f"the form is not valid: {'; '.join(faults)}", problems=faults)
    return int(str(seconds))


class _Counted:
    """A body that ends in an error beyond `limit` bytes."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._left = limit

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise BodyTooLarge(f"the form is over {self._limit} bytes: split the file", limit=self._limit)
        return message


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _shown(file: StoredFile, size: int) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": size,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


_FORM = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["file", "purpose"],
            "additionalProperties": False,
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "purpose": {"enum": ["batch"]},
                "expires_after[anchor]": {"enum": ["created_at"]},
                "expires_after[seconds]": {
                    "type": "integer",
                    "minimum": EXPIRY_S[0],
                    "maximum": EXPIRY_S[-1],
                },
            },
        }
    }
}
_LIST = (
    Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_LIST}, "At most so many."),
    Parameter("after", "query", {"type": "string"}, "The id behind which to go on."),
    Parameter("order", "query", {"enum": ["asc", "desc"]}, "By age."),
    Parameter("purpose", "query", {"type": "string"}, "Only those."),
)
OPERATIONS = (
    Operation(
        *("POST", "/v1/files", create_file, "Upload a file of requests for a batch.", "batches"),
        body_content=_FORM,
        answer=FileObject,
    ),
    Operation(
        *("GET", "/v1/files", list_files, "The files there are.", "batches"),
        answer=FileList,
        parameters=_LIST,
    ),
    Operation("GET", "/v1/files/{file_id}", get_file, "What a file is.", "batches", answer=FileObject),
    Operation(
        *("GET", "/v1/files/{file_id}/content", get_file_content, "What a file holds.", "batches"),
        answer_type="application/octet-stream",
    ),
    Operation("DELETE", "/v1/files/{file_id}", delete_file, "Delete a file.", "batches", answer=Deleted),
)
