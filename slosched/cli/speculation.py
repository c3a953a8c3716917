"""`--speculate`: how draft tokens are found, and how many a decode verifies in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from slosched.scheduler import PromptLookup, Speculation
from slosched.spelling import whole_number

_EXAMPLE = "ngram:4, or ngram:4,min=2,max=5"


@dataclass(frozen=True)
class Lookup:
    """Speculation by prompt lookup."""

    num_draft_tokens: int
    min_ngram: int = PromptLookup.min_ngram
    max_ngram: int = PromptLookup.max_ngram

    def speculation(self) -> Speculation:
        """Return what a scheduler needs to speculate."""
        return Speculation(PromptLookup(self.min_ngram, self.max_ngram), self.num_draft_tokens)


def parse_lookup(text: str) -> Lookup:
    """Return what a text such as "ngram:4,min=2" means; raise BadParameter for any other."""
    kind, _, numbers = str(text).partition(":")
    count, *settings = numbers.split(",")
    try:
        if kind != "ngram":
            raise ValueError(f"{kind!r} is no way to find drafts")
        given: dict[str, int] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in ("min", "max"):
                raise ValueError(f"{setting!r} is neither min= nor max=")
            given[f"{name}_ngram"] = whole_number(name, value)
        lookup = Lookup(whole_number("the number of draft tokens", count), **given)
        lookup.speculation()
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}; write {_EXAMPLE}") from error
    return lookup


Speculate = Annotated[
    Lookup | None,
    typer.Option(
        parser=parse_lookup,
        metavar="ngram:NUM[,min=N][,max=N]",
        help="Speculative decoding by prompt lookup: a decode verifies up to NUM draft tokens in a "
        "step, which followed its last 3 to 5 tokens (min to max) where they stood before: ngram:4."
        "  goodput verifies as many of them as pay, other policies all.",
    ),
]
