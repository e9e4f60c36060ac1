"""The scripted engine's commands, and the faults among them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from streamfleet_common.errors import DeadlineExceeded, GenerationFailed
from streamfleet_common.schemas import GenerateRequest
from streamfleet_worker.engine.base import Arrival, Finished, Step, Tokens
from streamfleet_worker.engine.script import Command, Fault
from streamfleet_worker.engine.scripted import ScriptedEngine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def engine_with(
    *prompts: str, epoch: int = 1, clock: Clock | None = None, deadline: float = 1e9
) -> ScriptedEngine:
    engine = ScriptedEngine(clock=clock or Clock())
    arrivals = {
        (prompt, epoch): Arrival(engine.prepare(GenerateRequest(prompt=prompt)), 100.0, deadline)
        for prompt in prompts
    }
    engine.add(arrivals)
    return engine


def texts(step: Step) -> list[str]:
    return ["".join(output.event.texts) for output in step.outputs if isinstance(output.event, Tokens)]


def ends(step: Step) -> dict[str, Finished]:
    return {output.key[0]: output.event for output in step.outputs if isinstance(output.event, Finished)}


def run(engine: ScriptedEngine) -> dict[str, Finished]:
    found: dict[str, Finished] = {}
    while engine.due_in() == 0.0:
        found |= ends(engine.step())
    return found


@pytest.mark.parametrize(
    ("prompt", "command"),
    [
        ("ECHO 2", Command(("tok0", " tok1"))),
        ("ECHO 0", Command(())),
        ("ECHO 2 AS ab TICK 30", Command(("ab0", " ab1"), tick_s=0.03)),
        ("ECHO 1 SIGNED TICK 0", Command(("tok0",), tick_s=0.0, signed_from=0)),
        ("ECHO 1 SIGNED@7", Command(("tok0",), signed_from=7)),
        ("ECHO 1 CRASH@0", Command(("tok0",), faults=(Fault("CRASH", 0),))),
        ("CRASH@2", Command(("tok0", " tok1", " tok2"), faults=(Fault("CRASH", 2),))),
        ("OOM@0 AS x", Command(("x0",), faults=(Fault("OOM", 0),))),
        ("HANG@0:1", Command(("tok0",), faults=(Fault("HANG", 0, until=1),))),
        ("BLOCK@0:1.6 AS x", Command(("x0",), faults=(Fault("BLOCK", 0, seconds=1.6),))),
        (
            "RAISE@0 RETRY@1:3",
            Command(("tok0", " tok1"), faults=(Fault("RAISE", 0), Fault("RETRY", 1, until=3))),
        ),
    ],
)
def test_what_a_command_says(prompt: str, command: Command) -> None:
    assert Command.read(prompt) == command


@pytest.mark.parametrize(
    "prompt",
    [
        *("Hi", "ECHO", "ECHO x", "ECHO -1", "ECHO 2 AS", "ECHO 2 TICK", "ECHO 2 TICK 1.5", "ECHO 2 please"),
        *("BLOCK@1", "CRASH@", "CRASH@1:", "CRASH@1:0.5", "crash@1", "SMASH@1", "xCRASH@1", "CRASH@1 now"),
        *("AS x", "TICK 5", "SIGNED", "SIGNED@1", "ECHO 1 SIGNED@", "ECHO 1 SIGNED@1:2"),
    ],
)
def test_what_is_no_command_comes_back_whole(prompt: str) -> None:
    assert Command.read(prompt) == Command((prompt,))


def test_tokens_come_a_tick_apart() -> None:
    clock = Clock()
    engine = engine_with("ECHO 2 TICK 500", "ECHO 3", clock=clock)

    first, second, third = engine.step(), engine.step(), engine.step()

    assert texts(first) == ["tok0", "tok0"]
    assert [step.rows for step in (first, second, third)] == [2, 1, 1]
    assert list(ends(third)) == ["ECHO 3"]
    assert engine.due_in() == pytest.approx(0.5)
    assert engine.step().rows == 0
    clock.now += 0.5
    assert engine.due_in() == 0.0
    assert list(ends(engine.step())) == ["ECHO 2 TICK 500"]
    assert engine.due_in() is None


def test_a_newcomer_does_not_wait_for_a_tick() -> None:
    engine = engine_with("ECHO 2 TICK 500")
    engine.step()
    engine.add({("new", 1): Arrival(engine.prepare(GenerateRequest(prompt="new")), 100.0, 1e9)})

    assert engine.due_in() == 0.0
    assert list(ends(engine.step())) == ["new"]


def test_a_deadline_comes_between_two_ticks() -> None:
    clock = Clock()
    engine = engine_with("ECHO 2 TICK 500", clock=clock, deadline=100.2)
    engine.step()
    assert engine.due_in() == pytest.approx(0.2)
    clock.now = 100.2
    (end,) = ends(engine.step()).values()
    assert (end.state, end.choices[0].text) == ("expired", "tok0")
    assert isinstance(end.error, DeadlineExceeded)


def test_the_engine_s_own_tick_is_for_those_who_name_none() -> None:
    clock = Clock()
    engine = ScriptedEngine(clock=clock, tick_s=2.0)
    for prompt in ("ECHO 2", "ECHO 2 TICK 1000"):
        engine.add({(prompt, 1): Arrival(engine.prepare(GenerateRequest(prompt=prompt)), 100.0, 1e9)})
    engine.step()
    assert engine.due_in() == pytest.approx(1.0)


def test_a_signed_token_tells_its_epoch_and_process() -> None:
    (end,) = run(engine_with("ECHO 2 AS ab SIGNED", epoch=7)).values()
    assert end.choices[0].text == f"ab0~7.{os.getpid()} ab1~7.{os.getpid()}"


def test_attempts_may_differ_from_a_token_on() -> None:
    ends = [run(engine_with("ECHO 4 SIGNED@2", epoch=epoch))["ECHO 4 SIGNED@2"] for epoch in (1, 3)]
    me = os.getpid()
    assert [end.choices[0].text for end in ends] == [
        f"tok0 tok1 tok2~1.{me} tok3~1.{me}",
        f"tok0 tok1 tok2~3.{me} tok3~3.{me}",
    ]
    assert ends[0].choices[0].token_ids == ends[1].choices[0].token_ids


@pytest.mark.parametrize("kind", ["RAISE", "RETRY"])
def test_one_request_fails_and_its_neighbours_do_not(kind: str) -> None:
    bad = f"ECHO 5 {kind}@3"
    found = run(engine_with(bad, *(f"ECHO 5 AS n{i}" for i in range(7))))

    failed = found.pop(bad)
    assert failed.state == "failed"
    assert isinstance(failed.error, GenerationFailed)
    assert failed.error.retryable == (kind == "RETRY")
    assert failed.choices[0].text == "tok0 tok1 tok2"
    assert failed.choices[0].finish_reason == "error"
    assert [end.state for end in found.values()] == ["done"] * 7
    assert all(end.usage.completion_tokens == 5 for end in found.values())


def test_a_fault_with_an_epoch_passes() -> None:
    prompt = "RETRY@1:2"
    states = [run(engine_with(prompt, epoch=epoch))[prompt].state for epoch in (1, 2, 3)]
    assert states == ["failed", "failed", "done"]


def test_a_fault_beyond_the_last_token_never_comes() -> None:
    engine = ScriptedEngine()
    script = engine.prepare(GenerateRequest(prompt="ECHO 5 CRASH@3", max_tokens=3))
    engine.add({("a", 1): Arrival(script, 0.0, 1e18)})
    assert run(engine)["a"].state == "done"


def test_out_of_memory_is_the_end_of_the_engine() -> None:
    engine = engine_with("ECHO 5 OOM@1")
    engine.step()
    with pytest.raises(MemoryError):
        engine.step()


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    before = """
        import sys, threading, time
        from streamfleet_worker.engine.script import Fault
        def strike(fault):
            thread = threading.Thread(target=fault.strike, daemon=True)
            thread.start()
            return thread
        """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(before) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_crash_leaves_no_time_for_anything() -> None:
    done = in_a_process("""
        try:
            Fault("CRASH", 0).strike()
        finally:
            print("still here", flush=True)
        """)
    assert (done.returncode, done.stdout) == (-9, "")


def test_a_hang_lasts_and_others_go_on() -> None:
    done = in_a_process("""
        hung = strike(Fault("HANG", 0))
        hung.join(0.1)
        print(hung.is_alive())
        """)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_a_block_holds_all_threads() -> None:
    # While it is held, a thread that looks at the clock all the time sees one leap as long as the block.
    done = in_a_process("""
        leaps, watching, over = [], threading.Event(), threading.Event()
        def watch():
            last = time.monotonic()
            watching.set()
            while not over.is_set():
                now = time.monotonic()
                leaps.append(now - last)
                last = now
            leaps.append(time.monotonic() - last)  # the end may be told before the next look
        watcher = threading.Thread(target=watch)
        watcher.start()
        watching.wait()
        strike(Fault("BLOCK", 0, seconds=0.7)).join()
        over.set()
        watcher.join()
        print(max(leaps) >= 0.69)
        """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
