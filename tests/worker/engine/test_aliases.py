"""The operator's names for models, and every way to write them wrong."""

from pathlib import Path

import pytest
import torch

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine import models
from streamfleet_worker.engine.aliases import Alias, resolve
from streamfleet_worker.engine.encoder_model import kind_of, load_encoder
from tiny_encoder import tiny_encoder
from tiny_model import tiny_model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.toml"


def test_an_alias_says_what_where_and_how(file: Path) -> None:
    file.write_text("""
[aliases.chat]
reference = "hf://organisation/name@v1"
precision = "bfloat16"
device = "cuda:1"
[aliases."bge small"]
reference = "/models/bge"
""")
    assert resolve("chat", "auto", "auto", file) == Alias("hf://organisation/name@v1", "cuda:1", "bfloat16")
    assert resolve("bge small", "auto", "auto", file) == Alias("/models/bge")
    assert resolve("other", "cpu", "float32", file) == Alias("other", "cpu", "float32")
    assert resolve("chat", "auto", "auto", None) == Alias("chat")


def test_what_is_asked_for_comes_before_what_an_alias_says(file: Path) -> None:
    file.write_text('aliases.chat = { reference = "x/y", precision = "bfloat16", device = "cuda" }')
    assert resolve("chat", "cpu", "auto", file) == Alias("x/y", "cpu", "bfloat16")
    assert resolve("chat", "auto", "float32", file) == Alias("x/y", "cuda", "float32")


def test_an_alias_of_an_alias(file: Path) -> None:
    file.write_text("""
[aliases]
a = { reference = "b", precision = "float16" }
b = { reference = "minilm", precision = "float32", device = "cpu" }
""")
    assert resolve("a", "auto", "auto", file) == Alias("minilm", "cpu", "float16")


@pytest.mark.parametrize(
    ("text", "circle"),
    [
        ('aliases.a.reference = "a"', "a -> a"),
        (
            'aliases.a.reference = "b"\naliases.b.reference = "c"\naliases.c.reference = "b"',
            "a -> b -> c -> b",
        ),
    ],
)
def test_a_circle_is_refused(file: Path, text: str, circle: str) -> None:
    file.write_text(text)
    with pytest.raises(ModelLoadFailed, match=circle):
        resolve("a", "auto", "auto", file)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[aliases.chat]\nreference = \n", "line 2"),
        ('[aliases.chat]\nreference = "x"\n[aliases.chat]', "line 3"),
        ('[alias.chat]\nreference = "x"', "models.toml: alias is not known: there is aliases"),
        (
            '[aliases.chat]\nreference = "x"\nprecison = "int8"',
            "models.toml: aliases.chat.precison is not known: there is reference, device, precision",
        ),
        ('[aliases.chat]\ndevice = "cpu"', "aliases.chat has no reference"),
        ("[aliases.chat]\nreference = 7", "aliases.chat.reference must be a text, not 7"),
        ('[aliases.chat]\nreference = ""', "aliases.chat.reference must be a text"),
        ('aliases.chat = "x"', "aliases.chat must be a table, with a reference"),
        ("aliases = 1", "aliases must be a table"),
    ],
)
def test_faults_are_named_by_their_place(file: Path, text: str, match: str) -> None:
    file.write_text(text)
    # One bad entry is told even if another one is asked for.
    with pytest.raises(ModelLoadFailed, match=match):
        resolve("other", "auto", "auto", file)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read(file: Path, content: bytes | None) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ModelLoadFailed, match=r"models\.toml cannot be read"):
        models.load("chat", aliases=file)


def test_models_are_loaded_by_their_alias(file: Path) -> None:
    (file.parent / "weights").symlink_to(tiny_encoder("bert"))
    file.write_text(f"""
[aliases.chat]
reference = "{tiny_model()}"
precision = "bfloat16"
device = "cpu"
[aliases.vectors]
reference = "./weights"
device = "cpu"
""")
    chat = models.load("chat", aliases=file)
    assert (chat.name, chat.dtype, chat.device.type) == ("chat", torch.bfloat16, "cpu")
    assert chat.revision == models.load(str(tiny_model()), "cpu").revision
    assert load_encoder("vectors", aliases=file).name == "vectors"
    assert kind_of("chat", aliases=file) == "generation"
    assert kind_of("vectors", aliases=file) == "encoder"


def test_an_alias_of_the_operator_comes_before_a_packaged_model(file: Path) -> None:
    file.write_text(f'aliases.minilm = {{ reference = "{tiny_encoder("bert")}", device = "cpu" }}')
    assert load_encoder("minilm", aliases=file).vocab_size == 1024
