"""What a service gets when it installs us: the wheel, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("streamfleet_common", "streamfleet_producer", "streamfleet_worker")

# A service as it may well be: it has a `common` and a `worker` of its own.
SERVICE = {
    "common/__init__.py": "OWNER = 'the service'\n",
    "worker/__init__.py": "from common import OWNER\n",
    "app.py": """\
import json
import sys

import common
import worker
from streamfleet_producer import Client, GenerateRequest, Sampling

request = GenerateRequest(prompt="Hello", max_tokens=7, sampling=Sampling(temperature=0.5, seed=1))
print(json.dumps({
    "owners": [common.OWNER, worker.OWNER],
    "common": common.__file__,
    "client": Client.__name__,
    "request": request.model_dump(mode="json"),
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
}))
""",
}


def run(*command: str | Path, cwd: Path) -> str:
    """Its output; a failure shows both of its streams."""
    # Neither our settings nor an import path of this run may reach the clean environment.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "STREAMFLEET_"))}
    answer = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        pytest.fail(f"{command}\n{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}")
    return answer.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist, and of the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: the build uses the hatchling that is installed, and no network.
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    run(*build, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def service(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A service's folder; its environment beside it holds the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("service")
    for name, text in SERVICE.items():
        path = folder / "service" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "venv", "--no-input")
    constraints = ROOT / "tests" / "constraints.txt"
    run(*pip, "install", "--quiet", "--constraint", constraints, wheel, cwd=folder)
    return folder / "service"


def python_of(service: Path) -> Path:
    return service.parent / "venv" / "bin" / "python"


def test_the_wheel_holds_three_prefixed_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    assert {name.partition("/")[0] for name in names} == {
        *PACKAGES,
        "streamfleet-0.1.0.dist-info",
    }
    for package in PACKAGES:
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    assert "streamfleet-0.1.0.dist-info/licenses/LICENSE" in names


def test_every_module_and_script_of_the_checkout_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    for package, root in zip(PACKAGES, ("common", "producer", "worker"), strict=True):
        for path in (ROOT / root / package).rglob("*"):
            if path.suffix in (".py", ".lua"):
                assert path.relative_to(ROOT / root).as_posix() in names


def test_the_sdist_leaves_the_tests_at_home(dist: Path) -> None:
    (found,) = dist.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        folders = {Path(name).parts[1] for name in archive.getnames()}

    assert {"common", "producer", "worker", "pyproject.toml", "LICENSE"} <= folders
    assert not folders & {"tests", "deploy", ".ci", ".venv"}


@pytest.mark.timeout(180)
def test_a_service_keeps_its_own_common_and_worker(service: Path) -> None:
    said = json.loads(run(python_of(service), "app.py", cwd=service))

    assert said["owners"] == ["the service", "the service"]
    assert Path(said["common"]) == service / "common" / "__init__.py"
    assert said["client"] == "Client"
    assert said["request"]["prompt"] == "Hello"
    assert said["request"]["max_tokens"] == 7
    assert said["request"]["sampling"]["seed"] == 1
    assert not {"torch", "transformers", "streamfleet_worker"} & set(said["modules"])


@pytest.mark.timeout(180)
def test_the_base_install_has_no_torch(service: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", service.parent / "venv")
    listed = json.loads(run(*pip, "list", "--format", "json", cwd=service))
    names = {entry["name"].lower() for entry in listed}

    assert {"streamfleet", "redis", "hiredis", "pydantic", "msgpack"} <= names
    extras = {"torch", "transformers", "tokenizers", "numpy", "rq", "typer", "structlog", "prometheus-client"}
    assert not extras & names


# Imports each module of the packages that a service touches; those of an extra say so themselves.
IMPORT_ALL = """\
import importlib, json, pkgutil, sys

names = ["streamfleet_producer", "streamfleet_common"]
common = importlib.import_module("streamfleet_common")
names += [module.name for module in pkgutil.walk_packages(common.__path__, "streamfleet_common.")]
for name in names:
    importlib.import_module(name)
print(json.dumps([names, sorted(sys.modules)]))
"""


@pytest.mark.timeout(180)
def test_all_of_common_imports_on_the_base_install_and_stays_light(service: Path) -> None:
    imported, loaded = json.loads(run(python_of(service), "-c", IMPORT_ALL, cwd=service))

    assert "streamfleet_common.schemas" in imported
    assert not {"torch", "transformers", "streamfleet_worker"} & set(loaded)


@pytest.mark.timeout(180)
def test_what_an_extra_brings_is_asked_for_by_its_name(service: Path) -> None:
    worker = subprocess.run(
        [python_of(service), "-m", "streamfleet_worker"],
        cwd=service,
        capture_output=True,
        text=True,
        check=False,
    )
    command = subprocess.run(
        [python_of(service).with_name("streamfleet"), "queues"],
        cwd=service,
        capture_output=True,
        text=True,
        check=False,
    )

    assert worker.returncode == 1
    assert worker.stderr.splitlines() == [
        "error: a worker needs the Python package 'prometheus_client': pip install 'streamfleet[worker]'"
    ]
    assert command.returncode == 1
    assert "pip install 'streamfleet[cli]'" in command.stderr
