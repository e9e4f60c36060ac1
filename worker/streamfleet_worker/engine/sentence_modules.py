"""What a folder of sentence-transformers says beside its model: its pooling, and how long a text may be.

`modules.json` lists the steps from a text to its vector; `<step>/config.json` has the settings of each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streamfleet_common.errors import ModelLoadFailed

Pooling = Literal["cls", "mean", "last"]

FILE = "modules.json"
STEPS = ["Transformer", "Pooling", "Normalize"]
_POOLINGS: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The steps of one model. Its defaults hold for a folder that does not list any."""

    pooling: Pooling | None = None
    """None: not said."""
    normalize: bool = True
    max_length: int | None = None
    """The longest text, in tokens, that the model is meant for."""


def read_modules(folder: Path) -> SentenceModules:
    """The steps listed in a model's folder.

    Raises:
        ModelLoadFailed: the list is broken, or has steps that are not known here.
    """
    if not (folder / FILE).is_file():
        return SentenceModules()
    try:
        steps = [(str(step["type"]).rsplit(".", 1)[-1], str(step["path"])) for step in _json(folder / FILE)]
        kinds = [kind for kind, _ in steps]
        if kinds not in (STEPS[:2], STEPS):
            raise ModelLoadFailed(
                f"{folder / FILE} has the steps {', '.join(kinds)}: what can be run here is "
                f"{', '.join(STEPS)}, the last only if wanted"
            )
        length = folder / "sentence_bert_config.json"
        return SentenceModules(
            pooling=_pooling(folder / steps[1][1] / "config.json"),
            normalize=len(steps) == 3,
            max_length=_json(length).get("max_seq_length") if length.is_file() else None,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadFailed(
            f"{folder / FILE} and what it names cannot be read: {type(error).__name__}: {error}"
        ) from error


def _pooling(file: Path) -> Pooling:
    config = _json(file)
    named = config.get("pooling_mode")
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = [named] if isinstance(named, str) else [_FLAGS.get(mode, mode) for mode in modes]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelLoadFailed(
            f"{file} asks for the pooling {' + '.join(modes) or 'none'}: only one of {', '.join(_POOLINGS)} "
            "can be done here"
        )
    return _POOLINGS[modes[0]]


def _json(file: Path) -> Any:
    return json.loads(file.read_text())
