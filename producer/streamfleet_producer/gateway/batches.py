"""OpenAI's batches: files of requests, answered by bulk jobs (extra `bulk`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from streamfleet_common.errors import BrokerUnavailable, InvalidRequest, RequestNotFound
from streamfleet_common.message import Text
from streamfleet_producer.bulk.batch import Batch
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.dialects import json_response
from streamfleet_producer.gateway.file_store import FileStore, StoredFile
from streamfleet_producer.gateway.files import COUNT, on_thread, store_of
from streamfleet_producer.gateway.operation import Operation, Parameter

if TYPE_CHECKING:
    from streamfleet_producer.bulk.batches import Batches  # which needs an extra

WINDOW_S = 24 * 3600
HELD_S = WINDOW_S + 3600
"""So long the input of a batch is kept at least, which ends a little after its window."""
MAX_LIST = 100
_FIRST_LINE_BYTES = 1024 * 1024
_KINDS = {"/v1/chat/completions": "generate", "/v1/completions": "generate", "/v1/embeddings": "embed"}
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
_Key = Annotated[Text, Field(min_length=1, max_length=64)]
_Value = Annotated[Text, Field(max_length=512)]


class BatchBody(BaseModel):
    """What is to be answered."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    input_file_id: Annotated[Text, Field(max_length=64)]
    endpoint: Endpoint
    """Where the first line goes; others may go elsewhere."""
    completion_window: Literal["24h"] = "24h"
    """What is not answered within it has failed."""
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None


class BatchObject(BaseModel):
    """A batch, in OpenAI's words."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: dict[str, int]
    metadata: dict[str, str] | None = None


class BatchList(BaseModel):
    """Batches, the newest first."""

    model_config = ConfigDict(frozen=True)

    object: Literal["list"]
    data: tuple[BatchObject, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True)
class _Files:
    """The three files of a batch."""

    source: tuple[StoredFile, Path]
    output: tuple[StoredFile, Path]
    errors: tuple[StoredFile, Path]


async def create_batch(call: Call[BatchBody]) -> Response:
    """Hand a file of requests in. With an idempotency key of before the batch of then is answered again.

    Raises:
        RequestNotFound, InvalidRequest, ModelNotFound, QueueFull: it cannot be answered, or not now.
        Conflict: the key was used for another batch.
    """
    store, desk, body = store_of(call), _desk(call), call.body
    first = await on_thread(_first, desk, store, call)
    if first is not None:
        return json_response(_shown(first))
    source = await on_thread(store.get, call.tenant.name, body.input_file_id)
    if source[0].purpose != "batch":
        raise InvalidRequest("input_file_id: a file that was uploaded for a batch is wanted")
    url, model = await on_thread(_first_line, source[1])
    if url != body.endpoint:
        raise InvalidRequest(f"endpoint: the first line of the file goes to {url}, not to {body.endpoint}")
    served = await call.served(model, _KINDS[body.endpoint])
    await on_thread(store.hold, call.tenant.name, source[0].id, HELD_S)
    files = await on_thread(_reserve, store, call.tenant.name, source)
    try:
        batch = await on_thread(_create, desk, call, served.queue, files)
    except (BrokerUnavailable, asyncio.CancelledError):
        raise  # it may have been created, and writes them then; else they expire
    except BaseException:
        await on_thread(_forget, store, call.tenant.name, files)
        raise
    if batch.spec.output_path != str(files.output[1]):  # created at the same time under the same key
        await on_thread(_forget, store, call.tenant.name, files)
    return json_response(_shown(batch))


async def get_batch(call: Call[None]) -> Response:
    """Where a batch stands. Raises RequestNotFound."""
    batch = await on_thread(_desk(call).get, call.http.path_params["batch_id"], call.tenant.name)
    return json_response(_shown(batch))


async def cancel_batch(call: Call[None]) -> Response:
    """Begin no more of it; what is answered stays. Raises RequestNotFound."""
    batch = await on_thread(_desk(call).cancel, call.http.path_params["batch_id"], call.tenant.name)
    return json_response(_shown(batch))


async def list_batches(call: Call[None]) -> Response:
    """The tenant's batches. Raises InvalidRequest and RequestNotFound."""
    desk, query = _desk(call), call.http.query_params
    limit = query.get("limit", "20")
    if not COUNT.fullmatch(limit) or not 1 <= int(limit) <= MAX_LIST:
        raise InvalidRequest(f"limit: 1 to {MAX_LIST} is wanted")

    def read() -> list[Batch]:
        return list(desk.list(call.tenant.name, after=query.get("after"), limit=int(limit)))

    page = [_shown(batch) for batch in await on_thread(read)]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            # One that is full may be the last; the next is empty then.
            "has_more": len(page) == int(limit),
        }
    )


def _desk(call: Call[Any]) -> Batches:
    desk = call.services.batches
    if desk is None:
        raise RequestNotFound(
            "this gateway takes no batches: start it with --files-dir (STREAMFLEET_FILES_DIR), "
            "and install the extra `bulk`"
        )
    return desk


def _first_line(path: Path) -> tuple[str, str | None]:
    """Where the first line goes, and to which model. Raises InvalidRequest."""
    with path.open("rb") as file:
        for raw in file:
            if len(raw) > _FIRST_LINE_BYTES:
                break
            if raw.strip():
                try:
                    line = json.loads(raw)
                    url, model = line["url"], line["body"].get("model")
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    break
                if isinstance(url, str) and (model is None or isinstance(model, str)):
                    return url, model
                break
    raise InvalidRequest(
        'the first line of the file is no request: {"custom_id": …, "method": "POST", "url": …, "body": {…}}'
    )


def _reserve(store: FileStore, tenant: str, source: tuple[StoredFile, Path]) -> _Files:
    name = source[0].filename.removesuffix(".jsonl")
    return _Files(
        source,
        store.reserve(tenant, f"{name}_output.jsonl"),
        store.reserve(tenant, f"{name}_errors.jsonl"),
    )


def _forget(store: FileStore, tenant: str, files: _Files) -> None:
    for file, _ in (files.output, files.errors):
        with contextlib.suppress(RequestNotFound):  # not even begun: it goes with the leftovers
            store.delete(tenant, file.id)


def _first(desk: Batches, store: FileStore, call: Call[BatchBody]) -> Batch | None:
    key = call.idempotency_key
    if key is None:
        return None
    return desk.created(key, store.path(call.tenant.name, call.body.input_file_id), **_about(call))


def _about(call: Call[BatchBody]) -> dict[str, Any]:
    tenant, body = call.tenant, call.body
    return {
        "tenant": tenant.name,
        "secret": tenant.secret,
        "endpoint": body.endpoint,
        "metadata": body.metadata,
    }


def _create(desk: Batches, call: Call[BatchBody], queue: str, files: _Files) -> Batch:
    return desk.create(
        files.source[1],
        files.output[1],
        files.errors[1],
        fleet_queue=queue,
        key=call.idempotency_key,
        dialect="openai",
        max_bytes=call.services.settings.max_file_bytes,
        expires_in_s=WINDOW_S,
        files_kept_s=int(call.services.settings.file_ttl_s),
        **_about(call),
    )


def _shown(batch: Batch) -> dict[str, Any]:
    source, output, errors = batch.spec.paths

    def moment(status: str) -> int | None:
        at = batch.times.get(status)
        return None if at is None else int(at)

    def written(path: Path, lines: int) -> str | None:
        # OpenAI's clients take a name for the sign that there is something to read, and all of it.
        return path.name if batch.is_over and lines else None

    failed = None
    if batch.error is not None:
        one = {"code": batch.error.code, "message": batch.error.message, "param": None, "line": None}
        failed = {"object": "list", "data": [one]}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.spec.endpoint,
        "errors": failed,
        "input_file_id": source.name,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": written(output, batch.counts.completed),
        "error_file_id": written(errors, batch.counts.failed),
        "created_at": int(batch.created_at),
        "in_progress_at": moment("in_progress"),
        "expires_at": batch.spec.expires_at or None,
        "finalizing_at": moment("finalizing"),
        "completed_at": moment("completed"),
        "failed_at": moment("failed"),
        "expired_at": moment("expired"),
        "cancelling_at": moment("cancelling"),
        "cancelled_at": moment("cancelled"),
        "request_counts": {
            "total": batch.counts.total,
            "completed": batch.counts.completed,
            "failed": batch.counts.failed,
        },
        "metadata": batch.spec.metadata or None,
    }


OPERATIONS = (
    Operation(
        *("POST", "/v1/batches", create_batch, "Have a file of requests answered.", "batches"),
        body=BatchBody,
        answer=BatchObject,
    ),
    Operation(
        *("GET", "/v1/batches", list_batches, "The batches there are.", "batches"),
        answer=BatchList,
        parameters=(
            Parameter(
                "limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_LIST}, "At most so many."
            ),
            Parameter("after", "query", {"type": "string"}, "The id behind which to go on."),
        ),
    ),
    Operation(
        *("GET", "/v1/batches/{batch_id}", get_batch, "Where a batch stands.", "batches"), answer=BatchObject
    ),
    Operation(
        *("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "Begin no more of a batch.", "batches"),
        answer=BatchObject,
    ),
)
