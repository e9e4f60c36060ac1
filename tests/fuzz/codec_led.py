"""Hostile bytes for the codec, led by what they reach in the code (pip install atheris, where it is built).

    python tests/fuzz/codec_led.py [--inputs 1000000]

Ends with 0 if nothing was found; otherwise libFuzzer says which input it was.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["streamfleet_common", "msgpack"]):
    import codec_inputs


def one(data: bytes) -> None:
    """The first byte says which door."""
    if data:
        codec_inputs.enter(data[0] % len(codec_inputs.DOORS), data[1:])


def main() -> None:
    """From good messages on."""
    parser = argparse.ArgumentParser(description="Led inputs for the codec.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number, (door, data) in enumerate(codec_inputs.seeds()):
            (Path(folder) / str(number)).write_bytes(bytes([door]) + data)
        limits = (f"-timeout={codec_inputs.HANG_S}", "-rss_limit_mb=2048", "-max_len=4096")
        atheris.Setup([sys.argv[0], f"-runs={options.inputs}", *limits, folder], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
