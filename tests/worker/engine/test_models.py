"""Loading: what a reference may be, and that every refusal says what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from streamfleet_common.errors import ModelLoadFailed, TokenizerFailed
from streamfleet_worker.engine import models
from streamfleet_worker.engine.kv_cache import CacheShape
from streamfleet_worker.engine.models import LoadedModel
from tiny_model import build_model, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return shutil.copytree(tiny_model(), tmp_path / "model")


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_folder(llama: LoadedModel) -> None:
    assert llama.name == str(tiny_model())
    assert llama.precision == "float32"
    assert (llama.max_positions, llama.vocab_size) == (512, 1024)
    assert llama.cache_shape == CacheShape(layers=2, heads=2, key_dim=16, value_dim=16)
    assert llama.eos_token_ids == {2}
    assert not llama.model.training


def test_the_revision_tells_contents_apart(folder: Path, llama: LoadedModel) -> None:
    assert models.load(str(folder)).revision == llama.revision
    build_model(seed=1).save_pretrained(folder)
    assert models.load(str(folder)).revision != llama.revision


def test_ends_of_text_come_from_all_three_places(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[7, 8])
    edit(folder / "generation_config.json", eos_token_id=9)
    assert models.load(str(folder)).eos_token_ids == {2, 7, 8, 9}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused_by_name(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelLoadFailed, match=f"{name}.*safetensors"):
        models.load(str(folder))


def test_code_of_the_model_is_never_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit(folder / "config.json", auto_map=auto, model_type="evil")
    with pytest.raises(ModelLoadFailed):
        models.load(str(folder))


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda f: (f / "model.safetensors").unlink(), ModelLoadFailed, "no weights"),
        (lambda f: (f / "config.json").unlink(), ModelLoadFailed, "config.json"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), ModelLoadFailed, "cannot be loaded"),
        (lambda f: (f / "tokenizer.json").write_text("{"), TokenizerFailed, "tokenizer"),
        (lambda f: (f / "config.json").write_text("{}"), ModelLoadFailed, "cannot be loaded"),
    ],
)
def test_broken_folders(
    folder: Path, spoil: Callable[[Path], object], error: type[Exception], match: str
) -> None:
    spoil(folder)
    with pytest.raises(error, match=match):
        models.load(str(folder))


SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GROUPED = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 16}
T5_SIZES = {"vocab_size": 1024, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
GEMMA3N = {
    **GROUPED,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 1024,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "activation_sparsity_pattern": None,
}


@pytest.mark.parametrize(
    ("config", "name", "values", "match"),
    [
        ("Mamba", "MambaForCausalLM", {**SMALL, "state_size": 4}, "MambaForCausalLM: only decoders"),
        ("T5", "T5ForConditionalGeneration", T5_SIZES, "T5Config.*AutoModelForCausalLM"),
        ("Bert", "BertForSequenceClassification", SMALL, "BertLMHeadModel.*missing"),
        # Positions are a bias of the attention (ALiBi).
        ("Bloom", "BloomForCausalLM", SMALL, "BloomForCausalLM: only decoders"),
        # The attention is written into the layer.
        ("StableLm", "StableLmForCausalLM", SMALL, "StableLmForCausalLM, whose attention cannot be replaced"),
        # Some layers use the keys and values of others.
        ("Gemma3nText", "Gemma3nForCausalLM", GEMMA3N, "Gemma3nForCausalLM whose cache is not the standard"),
        # Some layers have a state instead of keys and values.
        (
            "Lfm2",
            "Lfm2ForCausalLM",
            {**GROUPED, "layer_types": ["conv", "full_attention"]},
            "Lfm2ForCausalLM whose cache is not the standard",
        ),
    ],
)
def test_models_of_another_kind_are_refused_by_name(
    folder: Path, config: str, name: str, values: dict[str, Any], match: str
) -> None:
    (folder / "model.safetensors").unlink()
    made = getattr(transformers, f"{config}Config")(**values)
    getattr(transformers, name)(made).save_pretrained(folder)
    with pytest.raises(ModelLoadFailed, match=match):
        models.load(str(folder))


def test_an_attention_window_does_not_limit_the_length(load: Callable[..., LoadedModel]) -> None:
    for kind in ("mistral", "gemma2"):
        loaded = load(kind)
        assert loaded.model.config.sliding_window == 48
        assert loaded.max_positions == 512


def test_positions_that_are_stretched_for_long_texts_limit_the_length(folder: Path) -> None:
    # Beyond the original length a long row would change the encoding of all others.
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
        "factor": 4.0,
    }
    edit(folder / "config.json", rope_parameters=rope)
    assert models.load(str(folder)).max_positions == 128
