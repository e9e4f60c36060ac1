# -*- coding: utf-8 -*-
"""Make the project's environment in .venv, with any Python a user may start this with.

This file only finds a Python that is new enough; environment.py does the work. It is written
so that every Python since 2.7 can parse it: whoever types `make test` with an old interpreter
gets a sentence that helps, not a SyntaxError.
"""

from __future__ import print_function

import os
import subprocess
import sys

OLDEST = (3, 11)
# In the order of trust: the versions the constraints file was checked with come first.
NEWER = ("python3.12", "python3.13", "python3.11", "python3.14", "python3")

TOO_OLD = """\
streamfleet needs Python {oldest} or newer, and this is Python {version} ({executable}).
No newer one was found on the PATH. Install one, for example:
    Debian, Ubuntu:  apt-get install python3.12 python3.12-venv
    Fedora:          dnf install python3.12
    macOS:           brew install python@3.12
    anywhere:        pyenv install 3.12
If one is installed where the PATH does not lead, name it:
    make {target} PYTHON=/path/to/python3.12"""


def folders():
    """Where interpreters are looked for: the PATH, then the versions that pyenv keeps."""
    found = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = os.environ.get("PYENV_ROOT") or os.path.join(os.path.expanduser("~"), ".pyenv")
    versions = os.path.join(pyenv, "versions")
    if os.path.isdir(versions):
        found += [os.path.join(versions, name, "bin") for name in sorted(os.listdir(versions))]
    return found


def is_new_enough(python):
    """Whether `python` runs and is new enough; a pyenv shim may exist and still not run."""
    code = "import sys; sys.exit(sys.version_info < {0!r})".format(OLDEST)
    try:
        with open(os.devnull, "w") as nowhere:
            return subprocess.call([python, "-c", code], stdout=nowhere, stderr=nowhere) == 0
    except OSError:
        return False


def find_newer():
    """The path of a Python that is new enough, or None."""
    for name in NEWER:
        for folder in folders():
            python = os.path.join(folder, name)
            if os.access(python, os.X_OK) and is_new_enough(python):
                return python
    return None


def main():
    """Hand over to environment.py, in a newer Python if this one is too old."""
    if sys.version_info >= OLDEST:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        import environment  # noqa: PLC0415 - it would not parse on an old Python

        return environment.main()
    newer = find_newer()
    if newer is None:
        message = TOO_OLD.format(
            oldest=".".join(map(str, OLDEST)),
            version=".".join(map(str, sys.version_info[:3])),
            executable=sys.executable,
            target=os.environ.get("STREAMFLEET_MAKE_TARGET") or "test",
        )
        print(message, file=sys.stderr)
        return 1
    print("Python {0} is too old; going on with {1}".format(sys.version.split()[0], newer))
    sys.stdout.flush()
    return os.execv(newer, [newer, os.path.abspath(__file__)])


if __name__ == "__main__":
    sys.exit(main())
