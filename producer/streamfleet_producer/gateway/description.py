"""The description of the interface, as OpenAPI 3.1 says it: made of the operations themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from streamfleet_producer.gateway.operation import Operation, Parameter

_PLACE = re.compile(r"\{(\w+)(?::\w+)?\}")
_REF = "#/components/schemas/{model}"

ERRORS = {
    "400": "The request is not valid; the message names every problem.",
    "401": "A key is wanted, or this one is nobody's.",
    "404": "No such model, queue or request.",
    "409": "The idempotency key was used for another request.",
    "413": "The body is too large.",
    "429": "The queue is full, or the tenant has its share; try again after `Retry-After` seconds.",
    "431": "The header is too large.",
    "499": "Somebody cancelled the request.",
    "500": "The model or its worker failed on the request.",
    "503": "Redis or a worker is not there; try again after `Retry-After` seconds.",
    "504": "No answer before the deadline.",
}
COMMON: tuple[Parameter, ...] = (
    Parameter("Idempotency-Key", "header", {"type": "string", "maxLength": 256}, "Sent twice, it runs once."),
    Parameter(
        "X-Request-Timeout",
        "header",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400},
        "Seconds until the request is given up.",
    ),
    Parameter("X-Lane", "header", {"enum": ["high", "normal", "bulk"]}, "How urgent it is."),
)
"""What every operation with a body knows."""


def described(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """The document, of what is not hidden."""
    shown = [operation for operation in operations if not operation.hidden]
    wanted: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {}
    for operation in shown:
        if operation.body is not None:
            wanted[operation.body, "validation"] = None
        if operation.answer is not None:
            wanted[operation.answer, "serialization"] = None
    refs, definitions = models_json_schema(list(wanted), ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in shown:
        path = _PLACE.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "streamfleet",
            "version": version,
            "description": "A fleet of inference workers behind Redis streams.",
        },
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), "Error": _error(), "TgiError": _tgi_error()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, refs: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if operation.answer is not None:
        answer["application/json"] = {"schema": refs[operation.answer, "serialization"]}
    elif operation.answer_type is not None:
        answer[operation.answer_type] = {"schema": {}}
    if operation.streams:
        answer["text/event-stream"] = {"schema": {}}
    said: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [operation.tag],
        "operationId": operation.endpoint.__name__,
        "responses": {
            str(operation.status): {"description": "The answer.", **({"content": answer} if answer else {})},
            **{
                status: {"description": text, "content": _said(operation.error_schema)}
                for status, text in {**ERRORS, **operation.errors}.items()
            },
        },
        "security": [] if operation.public else [{"key": []}, {}],
    }
    parameters = [
        Parameter(name, "path", {"type": "string", "minLength": 1}, "", required=True)
        for name in _PLACE.findall(operation.path)
    ]
    parameters += operation.parameters
    if operation.body is not None:
        parameters += COMMON
        said["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[operation.body, "validation"]}},
        }
    elif operation.body_content:
        said["requestBody"] = {"required": True, "content": operation.body_content}
    if parameters:
        said["parameters"] = [parameter.described() for parameter in parameters]
    return said


def _said(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}


def _error() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "string"},
                    "details": {"type": "object"},
                },
            }
        },
    }


def _tgi_error() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["error", "error_type"],
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    }
