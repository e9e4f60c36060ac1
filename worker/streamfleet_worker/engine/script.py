"""What a prompt tells the scripted engine to do: which tokens to bring forth, how fast, and what to break.

====================  ============================================================================
command               what it does
====================  ============================================================================
``ECHO n``            n tokens, "tok0 tok1 …", one a step
``AS word``           the tokens are "word0 word1 …"
``TICK ms``           its tokens come ``ms`` apart; the first one at once
``SIGNED``            each token tells the epoch and the process that made it: "tok0~1.4711"
``SIGNED@k``          those from token k on do, so that two attempts differ there and not before
``CRASH@k``           the process kills itself with SIGKILL in place of token k
``OOM@k``             the step raises MemoryError, as a device without memory does; the engine is dead
``HANG@k``            the step never returns
``BLOCK@k:seconds``   the step takes so long and lets no other thread of Python run meanwhile
``RAISE@k``           this request alone fails, for good
``RETRY@k``           this request alone fails, in a way that may pass
anything else         the prompt itself as a single token
====================  ============================================================================

Tokens count from 0. ``ECHO`` comes first; the others follow in any order, and there may be several faults.
Of several choices each token bears its choice's number, "tok0#2", and a fault strikes the first to reach it.
A prompt that begins with a fault echoes one token more than the fault lets out. ``:n`` behind a fault (but
``BLOCK``) lets it happen up to the request's epoch n only, so ``CRASH@2:1`` crashes one worker and no more.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from streamfleet_common.schemas import FinishReason

Kind = Literal["CRASH", "OOM", "HANG", "BLOCK", "RAISE", "RETRY"]
KINDS: dict[str, Kind] = {
    "CRASH": "CRASH",
    "OOM": "OOM",
    "HANG": "HANG",
    "BLOCK": "BLOCK",
    "RAISE": "RAISE",
    "RETRY": "RETRY",
}
MAX_BLOCK_S = 3600.0
_FAULT = re.compile(r"([A-Z]+)@(\d{1,6})(?::(\d{1,6}(?:\.\d{1,3})?))?")
_SIGNED = re.compile(r"SIGNED(?:@(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in place of token `at`, in epochs up to `until`; for `seconds` if it passes."""

    kind: Kind
    at: int
    until: int | None = None
    seconds: float = 0.0

    def is_due(self, done: int, epoch: int) -> bool:
        """Whether it happens to a request that has `done` tokens, in this epoch."""
        return self.at == done and (self.until is None or epoch <= self.until)

    def strike(self) -> None:
        """Do to the process what is to be done; failures of the request alone are the engine's.

        Raises:
            MemoryError: the fault is OOM.
        """
        match self.kind:
            case "CRASH":
                os.kill(os.getpid(), signal.SIGKILL)
            case "OOM":
                raise MemoryError("told to run out of memory")
            case "HANG":
                threading.Event().wait()
            case "BLOCK":
                _hold_interpreter(self.seconds)
            case "RAISE" | "RETRY":
                pass


@dataclass(frozen=True, slots=True)
class Command:
    """A prompt, read."""

    texts: tuple[str, ...]
    tick_s: float | None = None
    signed_from: int | None = None
    faults: tuple[Fault, ...] = ()

    @classmethod
    def read(cls, prompt: str) -> Command:
        """The command in a prompt; if there is none, the prompt as its own answer."""
        words = prompt.split()
        count = -1
        if len(words) > 1 and words[0] == "ECHO" and words[1].isdecimal():
            count, words = int(words[1]), words[2:]
        elif not words or _fault(words[0]) is None:
            return cls((prompt,))
        stem, tick_s, signed_from, faults = "tok", None, None, list[Fault]()
        rest = iter(words)
        for word in rest:
            fault = _fault(word)
            if fault is not None:
                faults.append(fault)
            elif signed := _SIGNED.fullmatch(word):
                signed_from = int(signed[1] or 0)
            elif word == "AS" and (name := next(rest, "")):
                stem = name
            elif word == "TICK" and (ms := next(rest, "")).isdecimal():
                tick_s = int(ms) / 1000
            else:
                return cls((prompt,))
        if count < 0:
            count = max(fault.at for fault in faults) + 1
        texts = tuple(f"{stem}{i}" if i == 0 else f" {stem}{i}" for i in range(count))
        return cls(texts, tick_s, signed_from, tuple(faults))


@dataclass(frozen=True, slots=True)
class Answer:
    """What one choice will bring forth, all known beforehand."""

    texts: tuple[str, ...]
    """One text a token; the token's id is its place in the list."""
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Script:
    """What a request will bring forth. Its log-probabilities are made up, the same for each choice."""

    words: tuple[str, ...]
    """The prompt's words: its tokens, as far as the scripted engine knows any."""
    answers: tuple[Answer, ...]
    seed: int
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    cut_tokens: int
    command: Command

    @property
    def n(self) -> int:
        """Rows that it takes."""
        return len(self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.words)


def _fault(word: str) -> Fault | None:
    found = _FAULT.fullmatch(word)
    if found is None or (kind := KINDS.get(found[1])) is None:
        return None
    at, more = int(found[2]), found[3]
    if kind == "BLOCK":
        return None if more is None else Fault(kind, at, seconds=min(float(more), MAX_BLOCK_S))
    if more is not None and not more.isdecimal():
        return None
    return Fault(kind, at, until=None if more is None else int(more))


def cut(texts: Iterable[str], stops: Collection[str], include: bool) -> tuple[tuple[str, ...], bool]:
    """The texts up to the first stop string, and whether there was one."""
    texts = tuple(texts)
    if not stops:
        return texts, False
    whole = "".join(texts)
    # As in real engines: the first to be complete, and of those complete at once the longest.
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    if not ends:
        return texts, False
    end, negative_length = min(ends)
    keep = end if include else end + negative_length
    kept, start = [], 0
    for text in texts:
        kept.append(text[: max(0, keep - start)])
        start += len(text)
        if start >= end:
            break
    return tuple(kept), True


def logprob(place: int) -> float:
    """Of the token in this place; a number that bits hold exactly."""
    return -(place % 8 + 1) / 8


def likeliest(place: int, count: int) -> tuple[tuple[int, float], ...]:
    """So many tokens for this place and their log-probabilities, the one that comes first."""
    return tuple((place + rank, logprob(place) - rank) for rank in range(count))


def _hold_interpreter(seconds: float) -> None:
    # Called through PyDLL, C keeps the interpreter's lock; through CDLL it would let go of it.
    poll = ctypes.PyDLL(None).poll
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:  # a signal ends a poll early
        poll(None, 0, max(1, int(left_s * 1000)))
