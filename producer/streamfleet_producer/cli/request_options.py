"""The options that make a request, the same for every command that asks something."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.schemas import ChatMessage, GenerateRequest, Guide, Sampling

_ANSWER = "The answer"
_DRAW = "How it is drawn"
_FORM = "Its form (one of them)"


def _length(text: str) -> int | str:
    if text == "fit" or text.isdecimal():
        return text if text == "fit" else int(text)
    raise typer.BadParameter(f"{text!r} is neither a number nor fit")


Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT", help="The text; `-` reads it from stdin.", show_default=False)
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat/--raw",
        help="Send the text as a chat message, or raw, to be continued.",
        rich_help_panel=_ANSWER,
    ),
]
MaxTokens = Annotated[
    Any,
    typer.Option(
        help="Longest answer, in tokens; `fit` takes all that fits.",
        metavar="<int|fit>",
        parser=_length,
        rich_help_panel=_ANSWER,
    ),
]
MinTokens = Annotated[
    int, typer.Option(help="Shortest answer, in tokens.", show_default=False, rich_help_panel=_ANSWER)
]
N = Annotated[
    int, typer.Option("-n", "--n", help="How many answers.", show_default=False, rich_help_panel=_ANSWER)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        help="A text that ends the answer; may be repeated.",
        show_default=False,
        rich_help_panel=_ANSWER,
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the model's own end.", rich_help_panel=_ANSWER)
]
Truncate = Annotated[
    int | None,
    typer.Option(
        help="Cut a longer prompt to so many last tokens.", show_default=False, rich_help_panel=_ANSWER
    ),
]
Echo = Annotated[
    bool, typer.Option("--echo", help="Begin the answer with the prompt.", rich_help_panel=_ANSWER)
]
Logprobs = Annotated[
    bool,
    typer.Option(
        "--logprobs", help="Tell each token's log-probability; see --json.", rich_help_panel=_ANSWER
    ),
]
TopLogprobs = Annotated[
    int,
    typer.Option(
        help="Tell those of the k likeliest tokens too.", show_default=False, rich_help_panel=_ANSWER
    ),
]


def _draw(text: str) -> Any:
    """An option of the draw. What does nothing unless it is given needs no word on its default."""
    return typer.Option(help=text, show_default=False, rich_help_panel=_DRAW)


Temperature = Annotated[float, _draw("0, if not given: the likeliest token, always.")]
TopK = Annotated[int, _draw("From the k likeliest tokens.")]
TopP = Annotated[float, _draw("From the likeliest that reach this probability.")]
MinP = Annotated[float, _draw("From those this much as likely as the likeliest.")]
TypicalP = Annotated[float, _draw("From the most typical that reach this probability.")]
RepetitionPenalty = Annotated[float, _draw("Above 1: less of what prompt and answer hold.")]
PresencePenalty = Annotated[float, _draw("Above 0: less of what the answer holds.")]
FrequencyPenalty = Annotated[float, _draw("The same, times how often it holds it.")]
Seed = Annotated[int | None, _draw("The same seed gives the same draw.")]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        metavar="<file>",
        help="JSON that fits the schema in this file.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(help="Text that a regular expression matches.", show_default=False, rich_help_panel=_FORM),
]
Choice = Annotated[
    list[str] | None,
    typer.Option("--choice", help="One of these; repeat it.", show_default=False, rich_help_panel=_FORM),
]


def request(
    *,
    prompt: Prompt,
    chat: Chat = True,
    max_tokens: MaxTokens = "128",
    min_tokens: MinTokens = 0,
    n: N = 1,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    truncate: Truncate = None,
    echo: Echo = False,
    logprobs: Logprobs = False,
    top_logprobs: TopLogprobs = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    typical_p: TypicalP = 1.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choice = None,
) -> GenerateRequest:
    """The request that the options describe.

    Raises:
        InvalidRequest: with everything that is wrong.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise InvalidRequest("the prompt is empty: there is nothing to answer")
    forms = {
        "json_schema": None if json_schema is None else json_schema.read_text("utf-8", "replace"),
        "regex": regex,
        "choice": choice or None,
    }
    given: dict[str, Any] = {name: form for name, form in forms.items() if form is not None}
    return GenerateRequest(
        prompt=None if chat else text,
        messages=(ChatMessage(role="user", content=text),) if chat else None,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        truncate=truncate,
        sampling=Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
        ),
        guide=Guide(**given) if given else None,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs or top_logprobs > 0,
        top_logprobs=top_logprobs,
        echo=echo,
    )


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of a request, for a function whose first argument is the request."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    names = {parameter.name for parameter in own}

    def called(**given: Any) -> None:
        asked = request(**{name: value for name, value in given.items() if name not in names})
        command(asked, **{name: value for name, value in given.items() if name in names})

    made = inspect.signature(request, eval_str=True)
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    vars(called)["__signature__"] = made.replace(
        parameters=[*made.parameters.values(), *own], return_annotation=None
    )
    return called
