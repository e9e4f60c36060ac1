"""An engine in one's own process, without Redis: for scripts, tests and evaluations.

with load("smollm2") as model:
    print(model.run(GenerateRequest(prompt="The capital of France is")).choices[0].text)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from streamfleet_common.errors import GenerationFailed, StreamfleetError
from streamfleet_common.schemas import new_rid
from streamfleet_worker.engine.base import Arrival, Engine, Finished, Key, Parts, Tokens

if TYPE_CHECKING:
    from streamfleet_common.schemas import Prefill, Request

FOREVER_S = 10.0**9
MAX_BATCH_SIZE = 8


class Local:
    """Runs an engine on a thread of its own; every method may be called from any thread.

    Args:
        engine: what runs; nobody else may call it from here on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._orders: deque[Callable[[Engine], None]] = deque()
        self._readers: dict[Key, SimpleQueue[Prefill | Tokens | Parts | Finished | StreamfleetError]] = {}
        self._closing = False
        self._death: StreamfleetError | None = None
        engine.listen(self._notify)
        self._thread = threading.Thread(target=self._run, name="local-engine", daemon=True)
        self._thread.start()

    @property
    def model_id(self) -> str:
        """The reference that the model was loaded by."""
        return self._engine.info.model

    @property
    def device(self) -> str:
        """The device in words."""
        return self._engine.info.device

    @property
    def max_row_tokens(self) -> int:
        """Prompt and answer together, in tokens."""
        return self._engine.info.max_seq_len

    @property
    def exact(self) -> str:
        """The class of workers that give the same bits; "" if that cannot be promised."""
        return self._engine.info.exact

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes taken now, by use."""
        return self._engine.memory

    def count_tokens(self, request: Request) -> int:
        """Tokens of a request: its prompt, its texts, its state with all that is asked of it.

        Raises:
            InvalidRequest: it could not be run, and why.
        """
        prepared: Any = self._engine.prepare(request)
        return int(prepared.prompt_tokens)

    def run(self, request: Request, *, timeout_s: float = FOREVER_S) -> Finished:
        """Run a request to its end.

        Raises:
            StreamfleetError: it cannot be run, failed, or took longer than `timeout_s`.
        """
        for event in self.stream(request, timeout_s=timeout_s):
            if isinstance(event, Finished):
                return event
        raise GenerationFailed("the engine was closed")

    def stream(
        self, request: Request, *, timeout_s: float = FOREVER_S
    ) -> Generator[Prefill | Tokens | Parts | Finished, None, None]:
        """What a request brings forth, as it comes; `Finished` is the last.

        It starts at the first `next`, and is cancelled when the iterator is closed before its end.

        Raises:
            StreamfleetError: as `run` does.
        """
        prepared = self._engine.prepare(request)
        # Of random bits, since a request that names no seed draws by its id.
        key = (new_rid(), 1)
        now = time.monotonic()
        reader: SimpleQueue[Prefill | Tokens | Parts | Finished | StreamfleetError] = SimpleQueue()
        with self._wake:
            if self._death is not None:
                raise self._death
            self._readers[key] = reader
        self._order(lambda engine: engine.add({key: Arrival(prepared, now, now + timeout_s)}))
        try:
            while True:
                event = reader.get()
                if isinstance(event, StreamfleetError):
                    raise event
                if isinstance(event, Finished) and event.error is not None:
                    raise event.error
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            if self._readers.pop(key, None) is not None:
                self._order(lambda engine: engine.cancel([key]))

    def close(self) -> None:
        """End what runs, and free the model."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _notify(self) -> None:
        self._order(_nothing)

    def _order(self, order: Callable[[Engine], None]) -> None:
        with self._wake:
            self._orders.append(order)
            self._wake.notify()

    def _run(self) -> None:
        reason: StreamfleetError = GenerationFailed("the engine was closed")
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  whoever waits must hear of it
            reason = GenerationFailed(f"the engine died: {type(error).__name__}: {error}"[:1000])
        with self._wake:
            self._death = reason
            readers = list(self._readers.values())
        for reader in readers:
            reader.put(reason)
        self._engine.close()

    def _serve(self) -> None:
        engine: Engine = self._engine
        while True:
            due_in = engine.due_in()
            with self._wake:
                if not self._orders and not self._closing and (due_in is None or due_in > 0):
                    self._wake.wait(due_in)
                if self._closing:
                    return
                orders = list(self._orders)
                self._orders.clear()
            for order in orders:
                order(engine)
            due_in = engine.due_in()
            if due_in is not None and due_in <= 0:
                for output in engine.step().outputs:
                    reader = self._readers.get(output.key)
                    if reader is None:
                        continue  # nobody listens any more
                    if isinstance(output.event, Finished):
                        self._readers.pop(output.key, None)
                    reader.put(output.event)


def _nothing(_: Engine) -> None:
    pass


def load(
    model: str = "smollm2",
    device: str = "auto",
    precision: str = "auto",
    *,
    preload: bool = True,
    threads: int = 1,
    max_batch_size: int | None = None,
    max_seq_len: int = 4096,
    exact: bool = True,
    aliases: Path | None = None,
) -> Local:
    """Load a model, of either kind, and run it here.

    Args:
        model: an alias, a folder, a GGUF file or the name of a hub repository.
        device: "auto", "cpu", "cpu:<threads>", "cuda", "cuda:<number>", "mps".
        precision: "auto", "float32", "bfloat16" or "float16".
        preload: run the model before the first request.
        threads: of the CPU; they hold for the whole process.
        max_batch_size: answers that are generated at once, 8 if not said; or texts that are read at once, 32.
        max_seq_len: prompt and answer together, or one text, in tokens.
        exact: give a request the same bits in any company, where the machine can.
        aliases: a file of further aliases.

    Raises:
        ModelLoadFailed: there is no such model, or it is none that can run here.
        Unsupported: the device or precision is not to be had.
    """
    # Torch takes seconds to import.
    from streamfleet_worker.engine import devices, encoder_model  # noqa: PLC0415

    devices.set_threads(threads)
    if encoder_model.kind_of(model, aliases=aliases) == "encoder":
        from streamfleet_worker.engine import encoder_engine  # noqa: PLC0415

        return Local(
            encoder_engine.encoder_engine(
                encoder_model.load_encoder(model, device, precision, aliases=aliases),
                max_batch_size=max_batch_size or encoder_engine.MAX_BATCH_SIZE,
                max_seq_len=max_seq_len,
                exact=exact,
                preload=preload,
            )
        )
    from streamfleet_worker.engine import models  # noqa: PLC0415
    from streamfleet_worker.engine.generation import GenerationEngine  # noqa: PLC0415

    engine = GenerationEngine(
        models.load(model, device, precision, aliases=aliases),
        max_batch_size=max_batch_size or MAX_BATCH_SIZE,
        max_delay_s=0.0,
        max_seq_len=max_seq_len,
        exact=exact,
    )
    if preload:
        engine.warm_up()
    return Local(engine)
