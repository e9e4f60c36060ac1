"""vLLM on a CPU as a side of `generation.py`; run by the Python of its own environment.

    python vllm_side.py {vllm,vllm-compiled} SETUP

In one process, with as many threads as the others have, and one sequence for each row of the batch.
`vllm` runs the model as it is, like every other side; `vllm-compiled` is vLLM's default, which compiles it at
the first start (a minute, with a C++ compiler). Prefix caching is on, as is its default, and emptied before
each round.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from generation_side import Job, Result, Setup, serve, timed

CACHE_GB = 1


class VllmSide:
    """Its offline face, which streams nothing."""

    def __init__(self, setup: Setup, *, compiled: bool) -> None:
        # It reads the environment when it is imported.
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # noqa: PLC0415

        self._parameters = SamplingParams
        self._llm = LLM(
            setup.folder,
            dtype=setup.precision,
            max_model_len=setup.max_seq_len,
            max_num_seqs=setup.batch,
            enforce_eager=not compiled,
            enable_prefix_caching=True,
            seed=0,
        )

    def reset(self) -> None:
        self._llm.reset_prefix_cache()

    def run(self, jobs: Sequence[Job]) -> Result:
        return timed(lambda: self._answers(jobs))

    def _answers(self, jobs: Sequence[Job]) -> list[list[int]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": job.prompt_token_ids} for job in jobs],
            [self._parameters(temperature=0.0, max_tokens=job.max_tokens) for job in jobs],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    chosen, where = sys.argv[1:]
    given = Setup.read(Path(where))
    os.environ |= {
        "OMP_NUM_THREADS": str(given.threads),
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GB),
        # Threads go where the system puts them, as those of the other sides do.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    serve(lambda setup: VllmSide(setup, compiled=chosen == "vllm-compiled"), given)
