"""Finding a handler by its name: `module:function`."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.handlers.handler import Handler
from streamfleet_worker.handlers.user_code import place_of, trace_of

log = logging.getLogger(__name__)


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
    file = Path(module_name)
    if "/" in module_name:
        raise ModelLoadFailed(f"{module_name} is a path, and a module is wanted: {_start(file, name)}")
    try:
        module = importlib.import_module(module_name)
    # A script may run to its end when it is imported.
    except (Exception, SystemExit) as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module_name}.".startswith(f"{error.name}.")
        ):
            if file.suffix == ".py":
                raise ModelLoadFailed(
                    f"{file} is a file, and a module is wanted: {_start(file, name)}"
                ) from None
            raise ModelLoadFailed(
                f"there is no module {error.name!r}, neither in {folder} nor among what is installed: "
                "start it in the folder of that file"
            ) from None
        kind, place = type(error).__name__, place_of(error)
        trace = trace_of(error)
        if trace:
            log.error("%s raised %s when it was imported:%s", module_name, kind, trace)
        # An error of syntax names its place, and comes from Python's own importing.
        where = "" if isinstance(error, SyntaxError) else f" (at {place})"
        raise ModelLoadFailed(f"{module_name} cannot be imported: {kind}: {error}{where}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ModelLoadFailed(f"{module_name} has no {name!r}; {_there(module)}")
        found = getattr(found, part)
    handler = _handler(found)
    if not isinstance(handler, Handler):
        raise ModelLoadFailed(f"{path} is no handler: write @handler(...) above it; {_there(module)}")
    return dataclasses.replace(handler, path=path)


def _handler(value: Any) -> Any:
    # Not of any object: some have every attribute that they are asked for.
    return getattr(value, "__dict__", {}).get("handler") if callable(value) else None


def _start(file: Path, name: str) -> str:
    # Of a file in a package the package is wanted too: its imports may be relative.
    parts, folder = [file.stem], file.parent
    while folder.name and (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    module = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
    words = f"write {module}:{name}"
    return f"{words}, and start it in the folder {folder}" if folder.parts else words


def _there(module: ModuleType) -> str:
    """What could have been meant."""
    handlers = sorted(key for key, value in vars(module).items() if isinstance(_handler(value), Handler))
    if handlers:
        return f"the handlers there are {', '.join(handlers)}"
    file = getattr(module, "__file__", None)
    if file is not None:
        return f"there is no handler in {file}"
    folders = ", ".join(getattr(module, "__path__", ()))
    if not folders:
        return "it is built into Python"
    # Python makes a package of any folder where it finds no file of that name.
    return (
        f"what was found is a folder of that name, {folders}, without __init__.py: start it in the folder of "
        f"the file that is meant, or name a file in that folder, as in {module.__name__}.FILE:FUNCTION"
    )
