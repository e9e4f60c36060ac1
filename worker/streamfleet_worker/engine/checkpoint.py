"""A model's config, weights and tokenizer, read by transformers from a folder."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from streamfleet_common.errors import ModelLoadFailed, TokenizerFailed
from streamfleet_worker.engine.model_source import ModelSource, first_line


class Checkpoint:
    """What was saved of a model. No code of its own is run, and no pickled file is read.

    Raises:
        ModelLoadFailed: the config cannot be read.
    """

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._options: dict[str, Any] = {"trust_remote_code": False}
        if source.gguf is not None:
            self._options["gguf_file"] = source.gguf
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            self.config: Any = AutoConfig.from_pretrained(source.folder, **self._options)
        except Exception as error:  # whatever broken files make the libraries raise
            raise self._failure(error) from error

    @property
    def architecture(self) -> str:
        """The class that was saved, in transformers' name for it; "" if the config does not say."""
        return str((getattr(self.config, "architectures", None) or [""])[0])

    def build(self, auto: Any, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
        """The model with its weights, for inference only.

        Args:
            auto: the class of transformers that chooses the model's class, as `AutoModel`.
            device: where to.
            dtype: of the weights.
            options: what that class takes besides.

        Raises:
            ModelLoadFailed: the weights cannot be read, or are not those of the model.
        """
        options = {"dtype": dtype, "output_loading_info": True, **self._options, **options}
        if self.source.gguf is None:
            options |= {"config": self.config, "use_safetensors": True}
        if device.type == "cuda":
            options["device_map"] = {"": device}
        try:
            model, report = self._read(auto, options)
        except Exception as error:
            raise self._failure(error) from error
        if report["missing_keys"]:
            # transformers would make them up at random, and say so in a log.
            missing = sorted(report["missing_keys"])
            raise ModelLoadFailed(
                f"the weights are not those of a {type(model).__name__}: {len(missing)} tensors are missing "
                f"({', '.join(missing[:3])}{', …' if missing[3:] else ''})"
            )
        return model.to(device).eval().requires_grad_(False)

    def tokenizer(self) -> Any:
        """The tokenizer, as transformers wraps it.

        Raises:
            TokenizerFailed: it cannot be read.
        """
        try:
            return AutoTokenizer.from_pretrained(self.source.folder, **self._options)
        except Exception as error:
            raise TokenizerFailed(
                f"the tokenizer of {self.source.reference} cannot be read ({error}): a model needs its "
                "tokenizer.json and tokenizer_config.json beside the weights"
            ) from error

    def _read(self, auto: Any, options: dict[str, Any]) -> Any:
        # It reports weights that the model has no use for, as another head's; what is missing we look at.
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        try:
            return auto.from_pretrained(self.source.folder, attn_implementation="sdpa", **options)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            return auto.from_pretrained(self.source.folder, attn_implementation="eager", **options)
        finally:
            transformers_logging.set_verbosity(verbosity)

    def _failure(self, error: Exception) -> ModelLoadFailed:
        reference = self.source.reference
        if "trust_remote_code" in str(error):
            return ModelLoadFailed(f"{reference} needs code of its own to run, which is never executed here")
        return ModelLoadFailed(f"{reference} cannot be loaded: {first_line(error)}")


def rope_limit(config: Any) -> int | None:
    """Length up to which positions are encoded alike for all rows.

    Beyond it, "dynamic" and "longrope" scaling change with the longest row of a batch.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
    return None
