"""Devices and precisions by name; a GPU that is there and does not work."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamfleet_common.errors import Unsupported
from streamfleet_worker.engine import devices
from streamfleet_worker.engine.encoder_model import load_encoder
from tiny_encoder import tiny_encoder

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU"
)


@pytest.fixture
def threads() -> Iterator[None]:
    """For tests that change torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def broken_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that torch sees, and that fails at the first tensor."""
    ones = torch.ones

    def fail(*shape: int, device: Any = None, **options: Any) -> torch.Tensor:
        if "cuda" in str(device):
            raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")
        return ones(*shape, device=device, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", fail)


def test_the_cpu_and_its_threads(threads: None) -> None:
    torch.set_num_threads(1)
    assert devices.find_device("cpu") == torch.device("cpu")
    assert torch.get_num_threads() == 1
    loaded = load_encoder(str(tiny_encoder("bert")), "cpu:2")
    assert loaded.device == torch.device("cpu")
    assert torch.get_num_threads() == 2
    assert "2 of its threads" in loaded.device_name


@pytest.mark.parametrize("name", ["tpu", "cpu:", "cpu:x", "cuda:-1", "mps:0", "CPU", ""])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(
        Unsupported, match="name auto, cpu, cpu:<threads>, cuda, cuda:<number> or mps"
    ) as error:
        devices.find_device(name)
    assert error.value.feature == name


@pytest.mark.parametrize("name", ["cpu:0", "cpu:1025", "cpu:99999999999999999999"])
def test_threads_are_bounded(name: str, threads: None) -> None:
    before = torch.get_num_threads()
    with pytest.raises(Unsupported, match="1 to 1024 threads"):
        devices.find_device(name)
    assert torch.get_num_threads() == before


@needs_no_gpu
@pytest.mark.parametrize(
    ("name", "match"), [("cuda", "no NVIDIA GPU"), ("cuda:1", "no NVIDIA"), ("mps", "Apple")]
)
def test_a_gpu_that_is_not_there_is_named(name: str, match: str) -> None:
    with pytest.raises(Unsupported, match=match) as error:
        devices.find_device(name)
    assert error.value.feature == name


@needs_no_gpu
def test_auto_is_the_cpu_where_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_NVIDIA_DRIVER", Path("/nowhere"))
    assert devices.find_device("auto") == torch.device("cpu")
    assert not caplog.records


@needs_no_gpu
def test_a_driver_that_torch_cannot_use_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_NVIDIA_DRIVER", Path(__file__))
    assert devices.find_device("auto") == torch.device("cpu")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "RUNNING ON THE CPU: device cuda is there but cannot be used" in caplog.text


def test_auto_leaves_a_gpu_that_fails(broken_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    found = devices.find_device("auto")
    assert found.type != "cuda"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "device cuda is there but cannot be used: CUDA error: no kernel image is available" in caplog.text
    assert "TORCH_USE_CUDA_DSA" not in caplog.text


def test_a_gpu_that_was_asked_for_and_fails_is_refused(broken_gpu: None) -> None:
    with pytest.raises(Unsupported, match="cuda:0 is not to be had: CUDA error: no kernel image") as error:
        devices.find_device("cuda:0")
    assert error.value.feature == "cuda:0"
    with pytest.raises(Unsupported, match="1 are visible"):
        devices.find_device("cuda:1")


def test_precisions_by_name() -> None:
    assert devices.find_precision("auto", torch.device("cpu")) == torch.float32
    assert devices.find_precision("auto", torch.device("cuda")) == torch.bfloat16
    assert devices.find_precision("float16", torch.device("cpu")) == torch.float16
    with pytest.raises(Unsupported, match="name auto, float32, bfloat16, float16") as error:
        devices.find_precision("int3", torch.device("cpu"))
    assert error.value.feature == "int3"
