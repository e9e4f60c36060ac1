"""The page in a real browser: nothing is wider than a phone, and no label lies on another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from browser import BINARY, Browser
from run_files import request, samples, streamed, write
from streamfleet_producer.report.page import render
from streamfleet_producer.report.reading import read

pytestmark = [
    pytest.mark.skipif(BINARY is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.slow,
]
LONG = "a-name-that-is-as-long-as-names-may-be-and-that-no-browser-finds-a-place-to-break"[:80]
# Boxes of text are higher than their letters: a few pixels of them may meet.
TOUCHING = """
[...document.querySelectorAll('svg.plot')].flatMap((plot) => {
  const boxes = [...plot.querySelectorAll('text')].map((text) => [text, text.getBoundingClientRect()]);
  const frame = plot.getBoundingClientRect();
  return boxes.flatMap(([text, box], at) => [
    ...(box.left < frame.left - 2 || box.right > frame.right + 2 ? [plot.id + ': ' + text.textContent] : []),
    ...boxes.slice(at + 1).filter(([, other]) =>
      Math.min(box.right, other.right) - Math.max(box.left, other.left) > 1 &&
      Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 4
    ).map(([other]) => plot.id + ': ' + text.textContent + ' / ' + other.textContent),
  ]);
})
"""
WIDE = """
[...document.querySelectorAll('main *')].filter((one) =>
  !one.closest('.scroll > table') && one.getBoundingClientRect().right > innerWidth + 0.5
).map((one) => one.outerHTML.slice(0, 100))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pages")
    wide = [{**line, "ended_ms": line["ended_ms"] + 3.0 ** (n % 12)} for n, line in enumerate(streamed(300))]
    many = [
        request(7.0 * n, 3 + n % 91, batch_size=1 + n % 200, kind=kind) for n in range(400) for kind in "abc"
    ]
    failed = [request(n, 1, outcome="expired", error="deadline_exceeded") for n in range(3)]
    facts = {"settings": {LONG: LONG}, "command": LONG * 3}
    files = {
        "one": [
            write(folder / "one.jsonl", wide + samples(200) + failed, label=LONG, **facts, warmup_ms=3000)
        ],
        "two": [
            write(folder / "a.jsonl", streamed(40) + samples(80)),
            write(folder / "b.jsonl", streamed(40, slower=40), label=LONG),
        ],
        "six": [write(folder / f"{name}.jsonl", many, label=LONG, **facts) for name in "de"],
        "none": [write(folder / "none.jsonl", [], label=LONG)],
    }
    for name, found in files.items():
        (folder / f"{name}.html").write_text(render([read(file) for file in found]), "utf-8")
    return [folder / f"{name}.html" for name in files]


async def test_nothing_overflows_and_no_label_lies_on_another(pages: list[Path]) -> None:
    async with Browser() as browser:
        for width in (360, 768, 1280):
            await browser._ask(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=800,
                deviceScaleFactor=1,
                mobile=width < 500,
            )
            for page in pages:
                await browser.open(page.as_uri())
                where = f"{page.name} at {width} px"
                assert await browser.run("document.documentElement.scrollWidth <= innerWidth"), where
                assert await browser.run(WIDE) == [], where
                assert await browser.run(TOUCHING) == [], where
        assert browser.errors == []


async def test_light_and_dark_differ_and_paper_is_white(pages: list[Path]) -> None:
    colours = {}
    async with Browser() as browser:
        await browser.open(pages[0].as_uri())
        for name, medium, scheme in (
            ("light", "screen", "light"),
            ("dark", "screen", "dark"),
            ("paper", "print", "dark"),
        ):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            await browser._ask("Emulation.setEmulatedMedia", media=medium, features=features)
            colours[name] = await browser.run(
                "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
            )
    assert colours["paper"][0] == "rgb(255, 255, 255)"
    assert colours["paper"][1] == colours["light"][1] != colours["dark"][1]
    assert colours["light"][0] != colours["dark"][0], json.dumps(colours)
