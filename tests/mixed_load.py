"""A mixed load on the tiny model: adapters, grammars, few tokens, and what `generate` makes of it."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from adapters import merged, write_adapter
from greedy import continued
from served import GREEDY, Ask

from slosched.core import EndReason, SamplingParams
from slosched.engine.grammar import Definition, GuidanceCompiler
from slosched.engine.grammar import Kind as GrammarKind

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel
    from slosched.engine.torch.lora import LoraAdapter

MAX_TOKENS = 12
NUM_PAIRS = 4
REGEX = f"([a-h][0-9]){{{NUM_PAIRS}}}"
"""What some answers look like: letters and digits by turns, and then an end."""
PROMPTS = (
    "c3 a1 b, a1 b and a1 so on",
    "h",
    "c3 a1 b, a1 b and a1 so forth",
    "0123 0123 0124 0123 01",
    "a1b2 a1b2 a1b2 a",
)
"""Texts in which much stands twice, so that there are drafts, also some that break the grammar.
The third one begins like the first."""
FEW = "ab"
"""The only tokens of some other answers, of which drafts are often right."""
LORAS = (None, "one", "two")
"""The adapters of a `World`; None is the model alone."""


class Kind(StrEnum):
    """What an answer may be."""

    FREE = "free"
    FEW = "few"
    GRAMMAR = "grammar"


class World:
    """The model with two adapters and a grammar, and what `generate` makes of each prompt."""

    def __init__(self, model: LoadedModel, folder: Path) -> None:
        self.model = model
        paths = {
            name: write_adapter(folder / name, model.model, seed)
            for seed, name in enumerate(("one", "two"))
        }
        self.adapters: dict[str | None, LoraAdapter | None] = {None: None}
        self.adapters |= {name: model.load_adapter(path) for name, path in paths.items()}
        self._twins = {None: merged(model.model, paths["one"], scaling=0.0)}
        self._twins |= {name: merged(model.model, path) for name, path in paths.items()}
        backend = model.tokenizer.backend_tokenizer
        compiler = GuidanceCompiler(backend.to_str(), model.vocab_size, model.eos_token_ids)
        grammar = compiler.compile(Definition(GrammarKind.REGEX, REGEX))
        self.sampling = {
            Kind.FREE: GREEDY,
            Kind.FEW: replace(GREEDY, allowed_token_ids=tuple(self.ids(FEW))),
            Kind.GRAMMAR: SamplingParams(grammar=grammar),
        }
        self._expected: dict[tuple[str, str | None, Kind], list[int]] = {}

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.model.tokenizer(text).input_ids
        return found

    def ask(
        self, text: str, lora: str | None, kind: Kind, *, n: int = 1, arrival_step: int = 0
    ) -> Ask:
        """Return the ask for `n` answers of a kind to a text with an adapter."""
        ids, sampling, adapter = self.ids(text), self.sampling[kind], self.adapters[lora]
        return Ask(ids, MAX_TOKENS, sampling, n, lora, adapter, arrival_step)

    def expected(self, text: str, lora: str | None, kind: Kind) -> list[int]:
        """Return the tokens of `generate` with the adapter's merged weights."""
        key = text, lora, kind
        if key not in self._expected:
            num_tokens = 2 * NUM_PAIRS + 1 if kind is Kind.GRAMMAR else MAX_TOKENS
            allowed = {Kind.FREE: None, Kind.FEW: self.few, Kind.GRAMMAR: self.follows}[kind]
            output = continued(self._twins[lora], self.ids(text), num_tokens, allowed)
            self._expected[key] = output
        return self._expected[key]

    def odds(self, text: str, lora: str | None) -> torch.Tensor:
        """Return the log-probabilities of the token after each one of a text."""
        with torch.inference_mode():
            logits = self._twins[lora](torch.tensor([self.ids(text)])).logits[0]
        found: torch.Tensor = logits.log_softmax(dim=-1)
        return found

    def few(self, _output: list[int]) -> list[int]:
        return self.ids(FEW)

    def follows(self, output: list[int]) -> list[int]:
        """Return what may follow an output by the grammar, found without a grammar library."""
        if len(output) == 2 * NUM_PAIRS:
            return sorted(self.model.eos_token_ids)
        return self.ids("0123456789" if len(output) % 2 else "abcdefgh")


def end_of(kind: Kind) -> EndReason:
    """Return how an answer ends that nobody aborts."""
    return EndReason.STOP if kind is Kind.GRAMMAR else EndReason.LENGTH
