"""Tokenizers of every kind that matters to text, with vocabularies small enough to read.

Each comes as transformers wraps it. The control tokens are "<s>" (id 0) and "</s>" (id 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

BOS, EOS = 0, 1
CONTROL = ("<s>", "</s>")
WORDS = ("▁", "▁Hello", "▁there", "▁world", "▁the", "re", "x", "!", "▁é", "漢", "▁▁", "\n")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
FIRST_WORD = len(CONTROL)
FIRST_BYTE = FIRST_WORD + len(WORDS)
"""Id of the token of byte 0 in `sentencepiece_like` and `unigram`."""


def wrap(tokenizer: Tokenizer, *, adds_bos: bool = False, chat_template: str | None = None) -> Any:
    """A tokenizer in transformers' clothes."""
    tokenizer.add_special_tokens(list(CONTROL))
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat_template)


def byte_level_of(texts: Sequence[str | bytes]) -> Any:
    """Byte-level tokens of these texts, in order, from id 2; it is for decoding."""
    spell: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    tokens = ["".join(spell[b] for b in (t.encode() if isinstance(t, str) else t)) for t in texts]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate([*CONTROL, *tokens])}, []))
    made.decoder = decoders.ByteLevel()
    return wrap(made)


def sentencepiece_like(*, dropped: int = 1, **options: Any) -> Any:
    """The Llama-2 kind: "▁" for a space, bytes for what has no token, the first space of a text dropped.

    Or as many as `dropped`.
    """
    tokens = [*CONTROL, *WORDS, *BYTES]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, fuse_unk=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", dropped, 0),
        ]
    )
    return wrap(made, **options)


def unigram(decoder: Any = None) -> Any:
    """Unigram with bytes as fall-back, read with Metaspace; by default decoded as Gemma is."""
    scored = [(token, -float(i)) for i, token in enumerate([*CONTROL, *WORDS, *BYTES])]
    made = Tokenizer(models.Unigram(scored, 0, True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    gemma = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoder or decoders.Sequence(gemma)
    return wrap(made)


def metaspace() -> Any:
    """Unigram without bytes: the kind of T5 and XGLM."""
    return unigram(decoders.Metaspace(prepend_scheme="always"))


def byte_metaspace() -> Any:
    """A rare order of steps, for which tokens have no pieces."""
    return unigram(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def word_piece() -> Any:
    """The BERT kind: words are joined by spaces, "##" goes on with a word."""
    words = ["[UNK]", "hello", "world", "##ing", "##s", "##", ".", ",", "'", "do", "not", "n't", "é", "漢"]
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate([*CONTROL, *words])}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece("##", True)
    return wrap(made)


def suffixed() -> Any:
    """The kind of the first GPT: "</w>" ends a word, and becomes a space once another token follows."""
    words = ["hello</w>", "wor", "ld</w>", "!</w>", "x"]
    model = models.BPE({w: i for i, w in enumerate([*CONTROL, *words])}, [], end_of_word_suffix="</w>")
    made = Tokenizer(model)
    made.decoder = decoders.BPEDecoder("</w>")
    return wrap(made)


def words_only() -> Any:
    """No decoder at all: the library then puts a space between tokens."""
    words = ["hello", "world", "x"]
    return wrap(Tokenizer(models.WordLevel({w: i for i, w in enumerate([*CONTROL, *words])}, "x")))
