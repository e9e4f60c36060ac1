"""Handlers in processes of their own: what the processes do, and what becomes of calls when they die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pooled_handlers
from command import descendants, wait_gone
from eventually import eventually
from served_handler import ServedHandler, told
from streamfleet_common.codec import MAX_RESULT_BYTES
from streamfleet_common.errors import GenerationFailed, ModelLoadFailed
from streamfleet_worker.engine.item import ItemBatch
from streamfleet_worker.handlers import pipe, pool_member
from streamfleet_worker.handlers.call_input import CallInput
from streamfleet_worker.handlers.loading import load
from streamfleet_worker.handlers.process_pool import ProcessPool

Serve = Callable[..., ServedHandler]
Shared = Callable[[str], ServedHandler]


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Processes find their handlers as this one does, and are started again without a pause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(pooled_handlers.__file__).parent))
        patch.setattr(pool_member, "FIRST_BACKOFF_S", 0.001)
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the processes leave their marks."""
    monkeypatch.setenv(pooled_handlers.FOLDER, str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def shared_pools() -> Iterator[Callable[[str], ServedHandler]]:
    """Pools for tests to which it does not matter what the processes did before: to start one takes long."""
    pools: dict[str, ServedHandler] = {}

    def pool(name: str) -> ServedHandler:
        if name not in pools:
            pools[name] = ServedHandler(load(f"pooled_handlers:{name}"))
        return pools[name]

    yield pool
    for one in pools.values():
        one.close()


def marks(folder: Path, name: str) -> list[int]:
    """Pids of the processes that have left the mark, in their order."""
    path = folder / name
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def pool_of(served: ServedHandler) -> ProcessPool:
    pool = served.engine._runner
    assert isinstance(pool, ProcessPool)
    return pool


def serve_pool(serve: Serve, name: str) -> ServedHandler:
    return serve(load(f"pooled_handlers:{name}"))


def test_a_file_beside_the_handler_s_shadows_no_import(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # where whoever loads a handler adds the folder
    assert [told(end) for end in serve_pool(serve, "later").ask({"value": 1})] == [1]


# --- what they do -----------------------------------------------------------------------------


def test_batches_run_in_the_processes_at_the_same_time(serve: Serve, folder: Path) -> None:
    served = serve_pool(serve, "run")
    pids = set(pool_of(served).pids)
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert set(marks(folder, "built")) == pids

    # One hangs in a batch; the other answers all the rest.
    (hung,) = served.add([{"do": "hang"}])
    served.step()
    others = served.ask(*({"do": "pid"} for _ in range(20)))

    assert len({told(end) for end in others}) == 1
    assert told(others[0]) in pids
    assert served.engine.room().running == 1
    assert hung not in served.ends
    assert served.engine.memory["processes"] > 1 << 20


def test_outcomes_are_those_of_the_thread(shared_pools: Shared) -> None:
    served = shared_pools("later")

    ends = served.ask(
        {"value": [1.5, None, {"a": "b"}]},
        {"do": "error"},
        {"do": "retry"},
        {"do": "invalid"},
        {"value": None},
    )

    assert [end.state for end in ends] == ["done", "failed", "failed", "failed", "done"]
    assert ends[0].outputs == ([1.5, None, {"a": "b"}],)
    assert told(ends[1]) == "handler 'act' failed on this input: ValueError: no"
    assert ends[2].retry_after_s == 2.5
    assert told(ends[3]).startswith("handler 'act' gave an output that does not fit JSON: object is no JSON")
    assert told(ends[4]) is None

    ends = served.ask({"value": 1}, {"do": "raise"}, {"do": "memory"}, {"value": 2})
    assert [end.state for end in ends] == ["done", "failed", "failed", "done"]
    assert told(ends[1]) == "handler 'act' failed: ValueError: no"
    assert [end.error is not None and end.error.retryable for end in ends] == [False, False, True, False]


def test_parts_stream_from_the_processes(shared_pools: Shared) -> None:
    for name in ("spell", "spell_later"):
        served = shared_pools(name)
        keys = served.add(["abc", "", "de"])
        ends = served.run(keys)

        assert [end.outputs for end in ends] == [("a", "b", "c"), (), ("d", "e")]
        assert [served.parts.get(key, []) for key in keys] == [["a", "b", "c"], [], ["d", "e"]]


def test_a_stream_stops_when_nobody_wants_the_rest(shared_pools: Shared) -> None:
    served = shared_pools("spell")
    pids = pool_of(served).pids
    endless = served.add(["a…", "b…"])
    served.step()
    served.engine.cancel(endless)

    # Both processes are free again, and no other had to be started for that.
    assert [end.outputs for end in served.ask("xy")] == [("x", "y")]
    both = served.add(["…" for _ in range(16)])
    while any(not served.parts.get(key) for key in both):
        served.go_on()
    assert served.engine.room().running == 16
    served.engine.cancel(both)
    assert pool_of(served).pids == pids


def test_contexts_are_cleaned_up_at_the_end_which_is_the_workers_to_say(folder: Path) -> None:
    """A Ctrl-C reaches the processes too, and does nothing there."""
    served = ServedHandler(load("pooled_handlers:run"))
    pids = pool_of(served).pids
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert [told(end) for end in served.ask({"value": 1}, {"value": 2})] == [1, 2]
    assert marks(folder, "closed") == []

    served.close()

    assert sorted(marks(folder, "closed")) == sorted(pids)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_large_results_pass(shared_pools: Shared) -> None:
    size = MAX_RESULT_BYTES - 70_000
    sizes = (size, MAX_RESULT_BYTES, 3, size)
    ends = shared_pools("later").ask(*({"do": "fill", "value": one} for one in sizes))

    assert [end.state for end in ends] == ["done", "failed", "done", "done"]
    assert [len(told(end)) for end in ends if end.state == "done"] == [size, 3, size]


def test_a_batch_over_the_bound_of_a_message_runs_in_halves(
    shared_pools: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = shared_pools("later")
    pids = pool_of(served).pids
    monkeypatch.setattr(pipe, "MAX_FRAME_BYTES", 1000)
    inputs = [{"value": "x" * 200 + str(n)} for n in range(8)]

    ends = served.ask(*inputs, {"value": "y" * 2000})

    assert [told(end) for end in ends[:8]] == [one["value"] for one in inputs]
    assert "over the limit of 1000" in told(ends[8])
    assert pool_of(served).pids == pids


def test_a_batch_that_raises_there_is_told_once(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    served = serve_pool(serve, "later")

    ends = served.ask({"value": 1}, {"value": 2}, {"value": 3}, {"do": "raise"})

    assert [end.state for end in ends] == ["done"] * 3 + ["failed"]
    line = pooled_handlers._raise.__code__.co_firstlineno + 1
    told_of = [one for one in capfd.readouterr().err.splitlines() if "handler 'act' raised" in one]
    assert len(told_of) == 1
    assert told_of[0].endswith(f"pooled_handlers.py:{line} in _raise")


# --- when they die ----------------------------------------------------------------------------


def test_what_kills_its_process_fails_alone(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve_pool(serve, "run")
    before = set(pool_of(served).pids)

    ends = served.ask({"do": "die"}, {"value": 1}, {"do": "exit"}, {"value": 2})

    words = "the process of handler 'act' {} in this batch"
    for end, how in ((ends[0], "was killed by signal 9"), (ends[2], "ended with status 3")):
        assert isinstance(end.error, GenerationFailed)
        assert told(end) == words.format(how)
        assert not end.error.retryable
    assert [told(end) for end in ends[1::2]] == [1, 2]
    assert told(served.ask({"do": "pid"})[0]) != os.getpid()
    assert set(pool_of(served).pids) != before
    # Once a batch, though it took five processes to find the two.
    said = [one.getMessage() for one in caplog.records if "in this batch" in one.getMessage()]
    assert said == [words.format("was killed by signal 9")]


def test_without_bisection_a_death_fails_all_and_nothing_runs_twice(serve: Serve, folder: Path) -> None:
    served = serve_pool(serve, "send")

    ends = served.ask({"value": 1}, {"do": "die"}, {"value": 2})

    assert [end.state for end in ends] == ["failed"] * 3
    assert len(marks(folder, "sent")) == 1
    assert told(served.ask({"value": 1})[0]) == 1


def test_one_that_dies_amid_a_stream_fails_what_has_begun(shared_pools: Shared) -> None:
    served = shared_pools("spell")

    ends = served.ask("ab!", "cde", "f")

    assert [end.state for end in ends] == ["failed", "failed", "done"]
    assert ends[2].outputs == ("f",)
    assert [end.outputs for end in served.ask("gh")] == [("g", "h")]


def test_a_batch_that_takes_too_long_is_ended(serve: Serve) -> None:
    """Even one that holds the interpreter, where no signal handler of Python's would run."""
    served = serve_pool(serve, "hurry")

    (end,) = served.ask({"do": "hold"})
    assert told(end) == "the process of handler 'act' took longer than 1.0 s for a batch, and was ended"
    assert told(served.ask({"value": 5})[0]) == 5


async def test_one_that_dies_between_batches_is_replaced_before_the_next(serve: Serve, folder: Path) -> None:
    served = serve_pool(serve, "run")
    pool = pool_of(served)
    before = pool.pids

    os.kill(before[0], signal.SIGKILL)
    await eventually(lambda: len(marks(folder, "built")) == 3, patience_s=60.0)

    assert [told(end) for end in served.ask({"value": 1}, {"value": 2})] == [1, 2]
    assert before[1] in pool.pids


async def test_a_batch_that_nobody_wants_gives_its_process_back(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_member, "UNWANTED_S", 0.05)
    served = serve_pool(serve, "send")
    keys = served.add([{"do": "hold"}])
    served.step()
    await eventually(lambda: marks(folder, "hangs"), patience_s=60.0)

    served.engine.cancel(keys)

    assert told(served.ask({"value": 5})[0]) == 5


def test_processes_end_with_the_worker_whatever_they_do(folder: Path) -> None:
    """On Linux also while a handler holds the interpreter, so that nothing of Python's runs."""
    program = """
import sys
from streamfleet_worker.engine.item import ItemBatch
from streamfleet_worker.handlers.call_input import CallInput
from streamfleet_worker.handlers.loading import load
from streamfleet_worker.handlers.process_pool import ProcessPool

handler = load("pooled_handlers:send")
pool = ProcessPool(handler)
pool.launch(ItemBatch([CallInput(sys.argv[1].encode(), handler.signature.input)]))
print(pool.pids, flush=True)
sys.stdin.read()
"""
    worker = subprocess.Popen(
        [sys.executable, "-c", program, '{"do": "hold"}' if sys.platform == "linux" else '{"do": "hang"}'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline()
        processes = descendants(worker.pid)
        assert len(processes) == 1
        asyncio.run(eventually(lambda: marks(folder, "hangs"), patience_s=60.0))
    finally:
        worker.kill()
        worker.communicate()
    wait_gone(processes)


# --- when they do not start -------------------------------------------------------------------


def test_a_context_that_fails_is_told_at_once(folder: Path) -> None:
    with pytest.raises(
        ModelLoadFailed, match="context 'model' of handler 'act' could not be built: FileNotFound"
    ):
        ServedHandler(load("pooled_handlers:fragile"))
    assert len(marks(folder, "tried")) == 1


def test_a_process_that_ends_before_it_is_ready_is_told_at_once() -> None:
    with pytest.raises(
        ModelLoadFailed, match="the process of handler 'act' ended with status 7 before it was"
    ):
        ServedHandler(load("pooled_handlers:doomed"))


def test_a_process_that_cannot_be_started_again_breaks_the_pool(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_member, "START_TRIES", 2)
    (folder / "allowed").touch()
    served = ServedHandler(load("pooled_handlers:fragile"))
    assert told(served.ask({"value": 1})[0]) == 1
    assert not pool_of(served).is_broken()

    keys = served.add([{"do": "die"}, {"value": 2}])
    # The engine asks, once nothing it has tried has run.
    with pytest.raises(GenerationFailed, match="nothing can be run any more"):
        served.run(keys)
    assert pool_of(served).is_broken()
    assert len(marks(folder, "tried")) == 1 + 2

    kind = served.handler.signature.input
    running = pool_of(served).launch(ItemBatch([CallInput(b"{}", kind)]))
    with pytest.raises(ModelLoadFailed, match="context 'model'"):
        running.advance()
    served.close()
