"""`streamfleet dead`: requests that killed their workers, looked at, sent again, dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from json import dumps
from typing import Annotated, Any

import typer
from typer import Option

from streamfleet_common import codec
from streamfleet_common.dead_letters import DeadLetter
from streamfleet_common.errors import InvalidRequest, RequestNotFound
from streamfleet_producer.bulk.dead_replay import PER_MINUTE, DeadReplay, Replayed
from streamfleet_producer.cli import options
from streamfleet_producer.cli.operating import operator
from streamfleet_producer.cli.terminal import (
    EXIT_CODES,
    Command,
    Group,
    in_one_line,
    print_json,
    print_table,
    printable,
    run,
    say,
)
from streamfleet_producer.operations.control import known
from streamfleet_producer.operations.operator_broker import OperatorBroker

_HEADS = ("id", "buried", "tenant", "lane", "attempts", "lost", "payload", "why")
_RIGHT = {"attempts", "lost"}

Letters = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Dead letters, as `dead list` shows them.")
]
All = Annotated[bool, Option("--all", help="All of them.")]

dead = typer.Typer(
    name="dead",
    help="Dead letters: requests that killed their workers.",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dead.command("list", cls=Command, epilog=EXIT_CODES)
def list_(
    *,
    after: Annotated[str, Option(help="Those behind this id.", show_default=False)] = "",
    limit: Annotated[int, Option(min=1, max=1000, help="At most so many.")] = 100,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """List dead letters, oldest first."""

    async def work() -> tuple[list[DeadLetter], bool]:
        async with _graveyard(redis_url, queue) as broker:
            letters = await broker.dead_letters(after=after, count=limit)
            rest = await broker.dead_letters(after=letters[-1].id, count=1) if letters else []
            return letters, bool(rest)

    letters, has_more = run(work())
    if json:
        print_json([_document(letter) for letter in letters])
    elif letters:
        print_table(_HEADS, [_row(letter) for letter in letters], _RIGHT)
    else:
        say("no dead letters" + (f" behind {after}" if after else ""))
    if has_more:
        say(f"there are more: --after {letters[-1].id}")


@dead.command(cls=Command, epilog=EXIT_CODES)
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="The dead letter.", show_default=False)],  # noqa: A002
    *,
    payload: Annotated[
        bool, Option("--payload", help="With the request itself, prompt and all, if it was kept.")
    ] = False,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Show all that is known of one."""

    async def work() -> DeadLetter | None:
        async with _graveyard(redis_url, queue) as broker:
            return await broker.dead_letter(id)

    letter = run(work())
    if letter is None:
        raise _not_found(id)
    request = _request(letter) if payload else None
    if json:
        print_json({**_document(letter), **({"envelope": request} if payload else {})})
        return
    for name, text in in_words(letter):
        print(f"{name:<10}{text}")
    if payload:
        print(f"{'request':<10}{printable(dumps(request, ensure_ascii=False, indent=2))}")


@dead.command(cls=Command, epilog=EXIT_CODES)
def replay(
    ids: Letters = None,
    *,
    all_: All = False,
    rate: Annotated[float, Option(help="So many a minute; each may cost workers again.")] = PER_MINUTE,
    limit: Annotated[int, Option(min=1, help="With --all: at most so many.")] = 100,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Send dead letters again, and print the ids that they have now as requests.

    Their payloads must have been kept (STREAMFLEET_DEAD_LETTER_PAYLOAD of the workers).
    """
    _either(ids, is_all=all_)

    def told(replayed: Replayed) -> None:
        # At once: who ends this meanwhile has the ids of what was sent, whose letters are gone.
        if json:
            print_json({"letter": replayed.letter, "id": replayed.rid})
        else:
            print(replayed.rid, flush=True)

    async def work() -> int:
        async with _graveyard(redis_url, queue) as broker:
            replayer = DeadReplay(broker, per_minute=rate, told=told)
            if all_:
                await replayer.replay_all(most=limit)
                return replayer.passed_over
            letters = [(one, await broker.dead_letter(one)) for one in ids or ()]
            for one, letter in letters:
                if letter is None:
                    raise _not_found(one)
            await replayer.replay_each([letter for _, letter in letters if letter is not None])
            return 0

    if left := run(work()):
        say(
            f"passed over {left:,}: their payloads were not kept (STREAMFLEET_DEAD_LETTER_PAYLOAD), or "
            "their tenant's share is used up"
        )


@dead.command(cls=Command, epilog=EXIT_CODES)
def drop(
    ids: Letters = None,
    *,
    all_: All = False,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Delete dead letters. Prints how many."""
    _either(ids, is_all=all_)

    async def work() -> int:
        async with _graveyard(redis_url, queue) as broker:
            if not all_:
                return await broker.drop_dead(ids or ())
            dropped = 0
            while letters := await broker.dead_letters(count=1000):
                dropped += await broker.drop_dead([letter.id for letter in letters])
            return dropped

    dropped = run(work())
    if json:
        print_json({"dropped": dropped})
    else:
        print(dropped)
    if ids and dropped < len(ids):
        say(f"not to be found: {len(ids) - dropped:,}, dropped before or trimmed")


# --- parts


@asynccontextmanager
async def _graveyard(redis_url: str, queue: str | None) -> AsyncIterator[OperatorBroker]:
    """The queue, which has to be one: of a misspelled one there would be no dead letters, too.

    Raises:
        ModelNotFound: no worker has ever announced it.
    """
    async with operator(redis_url, queue) as broker:
        await known(broker)
        yield broker


def _either(ids: list[str] | None, *, is_all: bool) -> None:
    if bool(ids) == is_all:
        raise InvalidRequest("name dead letters, or --all")


def _not_found(id: str) -> RequestNotFound:  # noqa: A002
    return RequestNotFound(f"no dead letter {in_one_line(id, 40)}: it was dropped, or trimmed")


def _row(letter: DeadLetter) -> list[str]:
    buried = _moment(letter.buried_at_ms)
    kept = "kept" if letter.payload is not None else "-"
    numbers = (str(letter.attempts), str(letter.crashes))
    why = in_one_line(letter.why, 60)
    return [letter.id, buried, letter.tenant or "-", letter.lane or "-", *numbers, kept, why]


def in_words(letter: DeadLetter) -> list[tuple[str, str]]:
    """All but the request, a line each; what a stray entry does not say is left out."""
    lines = [
        ("id", letter.id),
        ("why", in_one_line(letter.why, None)),
        ("buried", _moment(letter.buried_at_ms)),
        ("request", in_one_line(letter.rid, None) or "-"),
    ]
    if letter.tenant:
        losses = f"{letter.crashes} workers were lost, {letter.solo_losses} of them ran nothing else"
        kept = "not kept: that is up to the workers (STREAMFLEET_DEAD_LETTER_PAYLOAD)"
        if letter.payload is not None:
            kept = "kept: --payload shows it, `dead replay` sends it again"
        lines += [
            ("tenant", in_one_line(letter.tenant, None)),
            ("lane", in_one_line(letter.lane, None)),
            ("accepted", _moment(letter.accepted_at_ms)),
            ("attempts", f"{letter.attempts}: {losses}"),
            ("worker", f"{in_one_line(letter.worker, None) or '-'} was the last of them"),
            ("digest", in_one_line(letter.digest, None)),
            ("payload", f"{letter.size:,} bytes, {kept}"),
        ]
    return lines


def _request(letter: DeadLetter) -> dict[str, Any]:
    """The envelope of a letter as plain values.

    Raises:
        InvalidRequest: it was not kept, or is none.
    """
    if letter.payload is None:
        raise InvalidRequest(
            f"dead letter {letter.id} has no payload: workers keep it where "
            "STREAMFLEET_DEAD_LETTER_PAYLOAD is set"
        )
    return codec.decode_envelope(letter.payload).model_dump(mode="json", exclude_defaults=True)


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _document(letter: DeadLetter) -> dict[str, Any]:
    names = ("id", "rid", "why", "tenant", "lane", "accepted_at_ms", "buried_at_ms", "attempts", "crashes")
    more = ("solo_losses", "worker", "digest", "size")
    return {**{name: getattr(letter, name) for name in names + more}, "is_kept": letter.payload is not None}
