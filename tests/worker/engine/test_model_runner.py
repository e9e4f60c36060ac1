"""The one place that runs a forward pass, and its comparison of the model in a batch with the model alone."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine_driver import Driver
from reference_model import reference
from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine import models
from streamfleet_worker.engine.batch import Batch
from streamfleet_worker.engine.generation import GenerationEngine
from streamfleet_worker.engine.kv_cache import KVCache
from streamfleet_worker.engine.model_runner import ModelRunner
from streamfleet_worker.engine.models import LoadedModel
from tiny_model import KINDS, Kind, tiny_model

Make = Callable[..., Driver]


def cache_for(loaded: LoadedModel) -> KVCache:
    return KVCache(loaded.cache_shape, 256, 4, 4096, dtype=loaded.dtype, device=loaded.device)


@pytest.mark.parametrize("granule", [1, 8])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_a_pass_gives_hidden_states_and_logits_of_its_tokens(kind: Kind, granule: int) -> None:
    loaded = models.load(str(tiny_model(kind)), device="cpu")
    runner, cache = ModelRunner(loaded, granule=granule), cache_for(loaded)
    prompts = [[40 + i for i in range(length)] for length in (3, 66, 1)]
    batch, places = Batch(), []
    for prompt in prompts:
        places.append(len(batch.token_ids))
        batch.prefill(cache.take(len(prompt)), 0, prompt)
    hidden = runner.run(batch)
    assert hidden.shape == (70, 64)
    # The last place of each, and one within, in an order of their own.
    asked = [69, places[1] + 65, places[1] + 10, 2]
    logits = runner.logits(hidden, asked)
    assert (logits.shape, logits.dtype) == ((4, 1024), torch.float32)
    expected = [reference(kind).logits(prompt) for prompt in prompts]
    wanted = torch.stack([expected[2][0], expected[1][65], expected[1][10], expected[0][2]])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_model_may_be_run_again_by_another_engine() -> None:
    # Its own attention caps the scores, which the library's plain one does not.
    loaded = models.load(str(tiny_model("gemma2")), device="cpu")
    for _ in range(2):
        ModelRunner(loaded).check(cache_for(loaded))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("long", "llama")])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_kind_passes_the_comparison(kind: Kind, precision: str) -> None:
    loaded = models.load(str(tiny_model(kind)), device="cpu", precision=precision)
    cache = cache_for(loaded)
    ModelRunner(loaded).check(cache)
    assert not any(arena.slots for arena in cache.arenas)


def refusal(loaded: LoadedModel) -> str:
    """What a warm-up says of the model."""
    cache = cache_for(loaded)
    with pytest.raises(ModelLoadFailed) as caught:
        ModelRunner(loaded).check(cache)
    assert not any(arena.slots for arena in cache.arenas)
    return str(caught.value)


def test_a_model_that_ignores_positions_is_refused(llama: LoadedModel) -> None:
    model = copy.deepcopy(llama.model)
    body = model.model.forward

    def stubborn(*args: Any, **inputs: Any) -> Any:
        if inputs.get("position_ids") is not None:
            inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        return body(*args, **inputs)

    model.model.forward = stubborn
    words = refusal(replace(llama, model=model))
    assert words.startswith("LlamaForCausalLM cannot be batched here: it gives other logits in a batch")


def test_a_model_that_breaks_is_refused_with_its_own_words(llama: LoadedModel) -> None:
    model = copy.deepcopy(llama.model)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel")

    model.model.layers[1].forward = broken
    assert refusal(replace(llama, model=model)) == "LlamaForCausalLM cannot be batched here: no such kernel"


def test_a_head_that_looks_at_more_than_its_place_is_refused(llama: LoadedModel) -> None:
    model = copy.deepcopy(llama.model)
    head = model.lm_head.forward
    model.lm_head.forward = lambda x: head(x + 0.1 * x.mean(dim=1, keepdim=True))
    assert "other logits" in refusal(replace(llama, model=model))


SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GROUPED = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2}


@pytest.mark.parametrize(
    ("family", "values", "match"),
    [
        # Its window is in the mask alone. It is longer than what the comparison looks at.
        ("Phimoe", {**GROUPED, "sliding_window": 300}, "PhimoeForCausalLM.* limits attention to 300 tokens"),
        ("GptOss", {**GROUPED, "num_experts_per_tok": 1}, "GptOssForCausalLM.*attention has s_aux"),
        ("OPT", {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 32}, "OPTForCausalLM cannot be batched here"),
    ],
)
def test_models_that_do_more_than_they_tell_are_refused_by_name(
    family: str, values: dict[str, Any], match: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    config = getattr(transformers, f"{family}Config")(**values)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    engine = GenerationEngine(models.load(str(folder), device="cpu"), max_seq_len=512)
    with pytest.raises(ModelLoadFailed, match=match):
        engine.warm_up()


def test_a_window_that_never_bites_is_no_reason_to_refuse(llama: LoadedModel) -> None:
    model = copy.deepcopy(llama.model)
    model.config.sliding_window = 512
    ModelRunner(replace(llama, model=model)).check(cache_for(llama))


def test_the_probe_leaves_the_cache_alone(llama: LoadedModel) -> None:
    runner, cache = ModelRunner(llama), cache_for(llama)
    slot = cache.take(3)
    batch = Batch()
    batch.prefill(slot, 0, [5, 6, 7])
    runner.run(batch)
    before = cache.read(slot, 0, 64)
    runner.probe()
    after = cache.read(slot, 0, 64)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(before, after, strict=True))
