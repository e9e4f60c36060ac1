"""The demo's board and story, drawn at many sizes without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from streamfleet_producer.cli.demo import MAX_TOKENS, QUESTIONS
from streamfleet_producer.cli.demo_screen import Board
from streamfleet_producer.cli.demo_story import story
from streamfleet_producer.cli.exchange import Exchange, Question
from streamfleet_producer.cli.terminal import printable

ANSWER = "It is what the question asks for, told at some length, and so on, and so on. " * 3


def asked(answer: str = "", count: int = len(QUESTIONS)) -> list[Exchange]:
    questions = [QUESTIONS[number % len(QUESTIONS)] for number in range(count)]
    exchanges = [Exchange(number, question) for number, question in enumerate(questions, 1)]
    for exchange in exchanges:
        if answer:
            exchange.state, exchange.text, exchange.tokens, exchange.first_s = "running", answer, 40, 0.25
    return exchanges


def drawn(board: Board, width: int, height: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=True, color_system=None).print(board)
    return out.getvalue().removesuffix("\n").split("\n")


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 12])
@pytest.mark.parametrize("width", [40, 60, 80, 120, 200, 300])
@pytest.mark.parametrize("height", [14, 24, 50])
def test_it_fits_and_keeps_its_size_while_answers_grow(count: int, width: int, height: int) -> None:
    sizes = set()
    for answer in ("", "Short.", ANSWER):
        lines = drawn(Board(asked(answer, count), MAX_TOKENS), width, height)
        assert max(map(len, lines)) <= width
        sizes.add(len(lines))
    assert len(sizes) == 1
    if count <= 6:
        assert sizes.pop() <= height - 2


def test_80_by_24_shows_every_question_and_the_end_of_each_answer() -> None:
    lines = drawn(Board(asked(ANSWER), MAX_TOKENS), 80, 24)

    for question in QUESTIONS:
        assert any(f"╭─ {question.text} ─" in line for line in lines)
    assert "".join(lines).count("so on.▌") == 6
    assert "".join(lines).count("first token 0.25 s") == 6


def test_a_short_terminal_gets_a_line_for_each() -> None:
    lines = drawn(Board(asked(ANSWER), MAX_TOKENS), 80, 14)

    assert len(lines) == 7
    for question, line in zip(QUESTIONS, lines, strict=False):
        assert line.startswith(f"▸ {question.text} ")
        assert line.endswith("and so on.")


def test_at_the_end_whole_answers_are_shown() -> None:
    board = Board(asked(ANSWER), MAX_TOKENS)
    board.whole = True

    assert "".join(drawn(board, 80, 14)).count("It is what") == 18
    short = Board(asked("Short."), MAX_TOKENS)
    size = len(drawn(short, 80, 24))
    short.whole = True
    assert len(drawn(short, 80, 24)) == size  # nothing jumps where all fits


def test_a_failure_is_shown_in_its_place() -> None:
    exchanges = asked("Half an ans")
    exchanges[2].state, exchanges[2].error = "failed", "the worker was lost"
    text = "\n".join(drawn(Board(exchanges, MAX_TOKENS), 80, 24))

    assert "the worker was lost" in text
    assert "✗ failed" in text


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\rc\x9bd\n\te") == "a[2Jbcd\n\te"
    exchange = asked("\x1b]0;title\x07 hello")[0]
    assert exchange.answer == "]0;title hello"


def test_the_story_has_the_batches_the_first_tokens_and_the_rate() -> None:
    exchanges = asked("An answer.")
    for number, exchange in enumerate(exchanges):
        exchange.state, exchange.first_s, exchange.total_s = "done", 0.2 + number / 100, 2.0
    metrics = {"count": 30.0, "sum": 120.0, "bucket{1.0}": 2.0, "bucket{4.0}": 12.0, "bucket{8.0}": 30.0}
    told = story(exchanges, {f"streamfleet_batch_size_{name}": value for name, value in metrics.items()})

    assert told == (
        "Six questions went through a Redis stream to one worker, which answered them together: "
        "30 runs of its model made 120 tokens, in batches of 4.0 requests on average, 18 of them larger "
        "than 4; one at a time it would have taken 120 runs. The first tokens were here 0.20 to 0.25 s "
        "after the question, and 240 tokens in 2.0 s make 120 a second, each published the moment it "
        "was made."
    )


def test_the_story_tells_of_failures_and_of_one_question() -> None:
    exchanges = [Exchange(1, Question("Why?"))]
    exchanges[0].state = "failed"
    assert story(exchanges, {}).endswith("one worker, and none was answered.")

    exchanges.append(Exchange(2, Question("How?"), "So.", 2, "done", 0.1, 0.5))
    assert story(exchanges, {}).endswith("1 of the answers failed.")
