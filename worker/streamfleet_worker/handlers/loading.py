"""Finding a handler by its name: `module:function`."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.handlers.handler import Handler


def load(path: str) -> Handler:
    """The handler at `module:function`; the current folder is looked in first.

    Raises:
        ModelLoadFailed: there is none, or its module cannot be imported; its words say which.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ModelLoadFailed(f"{path!r} names no handler: write module:function, as in sentiment:predict")
    folder = str(Path.cwd())
    if "" not in sys.path and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    # A script may run to its end when it is imported.
    except (Exception, SystemExit) as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module_name}.".startswith(f"{error.name}.")
        ):
            raise ModelLoadFailed(
                f"there is no module {error.name!r}, neither in {folder} nor among what is installed"
            ) from None
        raise ModelLoadFailed(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    handlers = sorted(key for key, value in vars(found).items() if isinstance(_handler(value), Handler))
    for part in name.split("."):
        if not hasattr(found, part):
            raise ModelLoadFailed(f"{module_name} has no {name!r}; {_there(handlers)}")
        found = getattr(found, part)
    handler = _handler(found)
    if not isinstance(handler, Handler):
        raise ModelLoadFailed(f"{path} is no handler: write @handler(...) above it; {_there(handlers)}")
    return dataclasses.replace(handler, path=path)


def _handler(value: Any) -> Any:
    # Not of any object: some have every attribute that they are asked for.
    return getattr(value, "__dict__", {}).get("handler") if callable(value) else None


def _there(handlers: list[str]) -> str:
    return f"the handlers there are {', '.join(handlers)}" if handlers else "there is no handler there"
