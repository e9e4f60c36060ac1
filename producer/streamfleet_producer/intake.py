"""Requests made ready to be submitted: their ids, their options, and a first look at whether they can be."""

from __future__ import annotations

import hashlib
import hmac
from contextvars import ContextVar
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from streamfleet_common.decisions import DecideRequest
from streamfleet_common.errors import InvalidRequest, RequestNotFound
from streamfleet_common.message import QueueName, Rid, Tenant, problems
from streamfleet_common.one_shot import CallRequest, ClassifyRequest, EmbedRequest, RerankRequest
from streamfleet_common.schemas import (
    MAX_DEADLINE_MS,
    MAX_RESULT_TTL_MS,
    Envelope,
    GenerateRequest,
    Request,
    Retry,
    new_rid,
)
from streamfleet_common.submissions import Submission
from streamfleet_producer.catalogue import Catalogue
from streamfleet_producer.length_check import LengthCheck
from streamfleet_producer.rid_pool import RidPool
from streamfleet_producer.submit_spans import submit_span
from streamfleet_producer.ticket import DEADLINE_S, RESULT_TTL_S, Options
from streamfleet_producer.token_counter import TokenCounter

_QUEUE: TypeAdapter[str] = TypeAdapter(QueueName)
_TENANT: TypeAdapter[str] = TypeAdapter(Tenant)
_RID: TypeAdapter[str] = TypeAdapter(Rid)
# The envelope counts milliseconds and knows no "never"; whoever calls us said seconds, and may say that.
_AS_CALLED = {
    "deadline_ms": f"deadline_s: 0.001 to {MAX_DEADLINE_MS // 1000} seconds are wanted",
    "result_ttl_ms": f"result_ttl_s: 1 to {MAX_RESULT_TTL_MS // 1000} seconds are wanted",
    "retry": 'retry: "never" or a Retry is wanted',
}

MAX_TEMPLATES = 64
NOTED: ContextVar[list[tuple[str, str]] | None] = ContextVar("submitted", default=None)
"""Where queue and id of what is submitted are put down, for whoever has to name it should it fail."""
_AS_THE_FLEET = Retry()
_NEVER = Retry(attempts=1)
_NAMES = tuple(Options.__annotations__)
# What a template has in the place of what each request has of its own.
_NO_RID = "00" + "0" * 32
_KINDS = (GenerateRequest, DecideRequest, EmbedRequest, ClassifyRequest, RerankRequest, CallRequest)
_NO_REQUEST = GenerateRequest(prompt="-")


class Intake:
    """What one client puts on its requests. `secret` is the tenant's, for ids that follow from a key.

    Raises:
        InvalidRequest: the queue's or the tenant's name is none.
        Unsupported, TokenizerFailed: the tokenizer cannot be read; see `TokenCounter.from_file`.
    """

    def __init__(
        self,
        queue: str,
        tenant: str,
        secret: bytes | str | None,
        max_request_bytes: int,
        tokenizer: TokenCounter | str | Path | None = None,
    ) -> None:
        faults = _faults("queue", _QUEUE, queue) + _faults("tenant", _TENANT, tenant)
        if faults:
            raise InvalidRequest("; ".join(faults), problems=faults)
        # Without a secret the ids of two tenants must still differ.
        key = tenant if secret is None else secret
        self._queue = queue
        self._tenant = tenant
        self._secret = key.encode() if isinstance(key, str) else key
        self._max_request_bytes = max_request_bytes
        self.lengths = LengthCheck(tokenizer)
        self._templates: dict[tuple[object, ...], Envelope] = {}

    def rid(self, key: str | None) -> str:
        """The id of a request: random, or the one that stands for an idempotency key."""
        return new_rid() if key is None else keyed_rid(self._secret, key)

    async def prepare(
        self,
        catalogue: Catalogue,
        request: Request,
        *,
        stream: bool,
        key: str | None,
        options: Options,
        rids: RidPool | None = None,
    ) -> Submission:
        """A submission of the request; its id is one of `rids`, if it is to be listened to at once.

        Raises:
            InvalidRequest: an option is not valid, or the request is over `max_request_bytes`.
            ModelNotFound, Unsupported, TooLong, InvalidRequest: no worker would take it.
        """
        if not isinstance(request, _KINDS):
            raise InvalidRequest(
                f"a request is wanted, not {type(request).__name__}: "
                f"build one of {', '.join(kind.__name__ for kind in _KINDS)}"
            )
        template = self._template(stream, key, options)
        span = None if "traceparent" in options else submit_span(self._queue, request.kind, self._tenant)
        if span is not None:
            template = template.changed({"traceparent": span.traceparent})
        try:
            submission = await self._prepare(catalogue, request, template, key, rids)
        except BaseException as error:
            if span is not None:
                span.submitted(error)
            raise
        if span is not None:
            span.name_request(submission.envelope.rid)
            submission.watching = span
        if (noted := NOTED.get()) is not None:
            noted.append((self._queue, submission.envelope.rid))
        return submission

    async def _prepare(
        self,
        catalogue: Catalogue,
        request: Request,
        template: Envelope,
        key: str | None,
        rids: RidPool | None,
    ) -> Submission:
        limit = await self.max_bytes(catalogue, request)
        await self.lengths.refuse(catalogue, request)
        if key is not None or rids is None:
            return Submission.of(template.around(self.rid(key), request), limit)
        rid = rids.take()
        try:
            return Submission.of(template.around(rid, request), limit)
        except BaseException:
            rids.give_back(rid)
            raise

    async def max_bytes(self, catalogue: Catalogue, request: Request) -> int:
        """How many bytes such a request may have, encoded. Raises as `Catalogue.check`."""
        return min(await catalogue.check(request), self._max_request_bytes)

    def _template(self, stream: bool, key: str | None, options: Options) -> Envelope:
        """The envelope that these options make, for any request. Most requests of a client share a few."""
        if key is not None or options.get("traceparent") is not None:
            return self._envelope(stream, key, options)
        wish = (stream, *sorted(options.items()))
        try:
            template = self._templates.get(wish)
        except TypeError:  # no option has such a value
            return self._envelope(stream, key, options)
        if template is None:
            template = self._envelope(stream, key, options)
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            self._templates[wish] = template
        return template

    def _envelope(self, stream: bool, key: str | None, options: Options) -> Envelope:
        unknown = [name for name in options if name not in _NAMES]
        if unknown:
            # Also an argument of a method, misspelt: what has no effect must not look as if it had one.
            faults = [f"{name}: no argument or option has this name" for name in unknown]
            known = ", ".join(_NAMES)
            raise InvalidRequest(
                f"options are not valid: {'; '.join(faults)}; options are {known}", problems=faults
            )
        retry = options.get("retry", _AS_THE_FLEET)
        deadline_ms = _ms("deadline_s", options.get("deadline_s", DEADLINE_S))
        result_ttl_ms = _ms("result_ttl_s", options.get("result_ttl_s", RESULT_TTL_S))
        try:
            return Envelope(
                rid=_NO_RID,
                tenant=self._tenant,
                lane=options.get("lane", "normal"),
                stream=stream,
                deadline_ms=deadline_ms,
                on_restart=options.get("on_restart", "restart"),
                retry=_NEVER if retry == "never" else retry,
                idempotency_key=key,
                result_ttl_ms=result_ttl_ms,
                traceparent=options.get("traceparent"),
                request=_NO_REQUEST,
            )
        except InvalidRequest as error:
            faults = [_AS_CALLED.get(fault.partition(":")[0], fault) for fault in error.problems]
            raise InvalidRequest(f"options are not valid: {'; '.join(faults)}", problems=faults) from None


def _ms(name: str, seconds: float) -> int:
    try:
        return round(seconds * 1000)
    except (TypeError, ValueError, OverflowError):
        fault = f"{name}: a finite number of seconds is wanted, not {str(seconds)[:40]}"
        raise InvalidRequest(fault, problems=[fault]) from None


def _faults(what: str, adapter: TypeAdapter[str], value: str) -> list[str]:
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        return [f"{what}: {fault}" for fault in problems(error)]
    return []


def keyed_rid(secret: bytes, key: str) -> str:
    """The id of the request with this idempotency key: the record itself is the key.

    It is "00" (the shard) and the first 32 hex digits of HMAC-SHA256(secret, key), so that nobody without
    the tenant's secret can tell the id of another's request.
    """
    return "00" + hmac.new(secret, key.encode("utf-8", "replace"), hashlib.sha256).hexdigest()[:32]


def checked(rid: str) -> str:
    """The id, if it has the form of one: names of keys and channels are made of it.

    Raises:
        RequestNotFound: it has not.
    """
    try:
        return _RID.validate_python(rid)
    except ValidationError:
        raise not_found() from None


def not_found() -> RequestNotFound:
    """The one error for an id that is malformed, unknown, expired or another tenant's."""
    return RequestNotFound("no such request: it was never accepted, or its result has expired")
