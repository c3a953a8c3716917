"""The definition of a grammar, as a client writes it, and the interface of its compiler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from slosched.core import GrammarError, OutputGrammar


class Kind(StrEnum):
    """The languages in which clients define what an answer may be."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    CHOICE = "choice"
    """A JSON list of strings, of which the answer is one."""
    GRAMMAR = "grammar"
    """A context-free grammar: GBNF, which begins at `root`, or Lark, which begins at `start`."""
    STRUCTURAL_TAGS = "structural tag"
    """A JSON object whose `tags` are a list of objects with `trigger`, `begin`, `schema` and `end`:
    the answer is any text, but where it has written a trigger, it goes on with the rest of one of
    the `begin` that start with it, then with an instance of the JSON schema, then with `end`.  If
    `stops_after_first` is true, it ends there."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A grammar in the words of its client; equal definitions mean the same grammar."""

    kind: Kind
    text: str
    has_whitespace: bool = True
    """Whether JSON may have whitespace between its parts."""
    whitespace_pattern: str | None = None
    """A regular expression for that whitespace; None for any of a bounded length."""


class GrammarCompiler(Protocol):
    """Compiles definitions for the vocabulary of one model.  Any thread may call it."""

    def compile(self, definition: Definition, /) -> OutputGrammar:
        """Return the compiled grammar; raise GrammarError if the definition is wrong."""


@dataclass(frozen=True, slots=True)
class NoGrammars:
    """Refuses every definition, where there is nothing that could follow a grammar."""

    why: str

    def compile(self, _definition: Definition, /) -> OutputGrammar:
        raise GrammarError(self.why)
