"""Grammars compiled and followed by llguidance (https://github.com/guidance-ai/llguidance).

It parses as the output grows, so that compiling takes milliseconds, and bounds the work of each
step.  One wheel without dependencies runs on CPUs of all systems, and it lets other threads run
while it compiles and while it finds masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from slosched.core import GrammarError, SloschedError
from slosched.engine.grammar.definition import Definition, Kind

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_CHARS = 65_536
"""The length of a definition, a whitespace pattern included.  A schema of this length, with a
pattern for each property, compiles in 0.2 s of CPU time."""
_SHOWN_CHARS = 250
_REGEX_SYNTAX = re.compile(r"[][\\.+*?()|{}^$#&~-]")
_WHITESPACE = r"[ \n\r\t]{1,32}"
"""Whitespace between the parts of JSON.  It is bounded, since a model that has begun to write
whitespace may write nothing else until its output limit."""
_LIMITS = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Limits of llguidance: about 8 ms for the lexer and 1 ms for the parser in one step of a request,
and 100 MB for the states of a lexer."""

_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""What llguidance knows as the `format` of a string.  It refuses others, such as `password`."""
_VALUES = ("const", "default", "enum", "examples")
"""Keywords of a JSON schema with values of the instance, in which nothing is a keyword."""

_UNFORCED = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}
"""A grammar whose option holds for the one before it: where only one text can follow, any tokens
may write it.  Else llguidance wants those of its tokenizer, which it then refuses if one of them is
special, as `<think>` is in many vocabularies."""


class LibraryMissingError(SloschedError):
    """llguidance is not installed."""


class GuidanceCompiler:
    """A compiler for one vocabulary, of which creating takes a second for 150,000 tokens.

    `tokenizer_json` is the whole of a tokenizer in the format of the package tokenizers, and
    `vocab_size` at least the number of its tokens.  `eos` are the tokens with which the model ends
    an output; an answer ends with one of them as soon as its grammar allows no more, and may end
    with one wherever the grammar is complete.

    Raises LibraryMissingError without llguidance, ValueError for a tokenizer that it cannot read.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos: Iterable[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise LibraryMissingError(
                "structured output needs the grammar extra: pip install 'slosched[grammar]'"
            ) from error
        self._ends = frozenset(eos)
        if not self._ends:
            raise ValueError("the model has no token that ends an output")
        self._library: Any = llguidance
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=sorted(self._ends)
        )

    def compile(self, definition: Definition) -> GuidedGrammar:
        """Return the compiled grammar; raise GrammarError that says what is wrong with it."""
        num_chars = len(definition.text) + len(definition.whitespace_pattern or "")
        if num_chars > _MAX_CHARS:
            raise GrammarError(
                f"the {definition.kind} has {num_chars} characters, at most {_MAX_CHARS} are taken"
            )
        try:
            translated = json.loads(self._translated(definition))
            text = json.dumps({"grammars": [*translated["grammars"], _UNFORCED]})
        except (ValueError, RecursionError) as error:
            raise GrammarError(_wrong(definition, str(error))) from error
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_wrong(definition, matcher.get_error()))
        return GuidedGrammar(matcher, self._ends)

    def _translated(self, definition: Definition) -> str:
        """Return the definition in llguidance's own format, which is JSON."""
        matcher, text = self._library.LLMatcher, definition.text
        if definition.kind is Kind.JSON_SCHEMA:
            options = _json_options(definition)
            schema = json.dumps(_without_unknown_formats(json.loads(text)))
            return str(matcher.grammar_from_json_schema(schema, overrides=options))
        if definition.kind is Kind.STRUCTURAL_TAGS:
            return _of_lark(self._tagged(definition))
        if definition.kind is Kind.CHOICE:
            # As one lexeme; the parser could not look at thousands of them in a step.
            text = "|".join(_REGEX_SYNTAX.sub(r"\\\g<0>", choice) for choice in json.loads(text))
        if definition.kind is Kind.GRAMMAR:
            return _of_lark(self._library.grammar_from("grammar", text))
        return str(matcher.grammar_from_regex(text))

    def _tagged(self, definition: Definition) -> str:
        """Return the grammar of text with structural tags, in llguidance's kind of Lark.

        A trigger that is one token of its own kind, as models have for calls, is no text.  Any
        other ends a lexeme that is `lazy`, so that no text goes on behind it.  What follows has
        such tokens, too, where models were trained to write them.
        """
        wanted, options = json.loads(definition.text), _json_options(definition)
        tags: list[dict[str, Any]] = wanted["tags"]
        names = " | ".join(f"tag_{i}" for i in range(len(tags)))
        some = f"({names})?" if wanted["stops_after_first"] else f"({names})*"
        last = "| text" if wanted["stops_after_first"] else "text"
        lines = ["%llguidance {}", f"start: {some} {last}", "text: TEXT", r"TEXT: /(.|\n)*/"]
        for i, tag in enumerate(tags):
            trigger = str(tag["trigger"])
            if (special := self._special(trigger)) is not None:
                head = f"TEXT {special}"
            else:
                head = f"tag_{i}_head"
                lines.append(f"{head}[lazy]: TEXT {json.dumps(trigger)}")
            rest, end = str(tag["begin"]).removeprefix(trigger), str(tag["end"])
            known: Any = _without_unknown_formats(tag["schema"])
            schema = json.dumps({**known, "x-guidance": options})
            lines.append(f"tag_{i}: {head} {self._words(rest)} %json {schema} {self._words(end)}")
        return "\n".join(lines)

    def _words(self, text: str) -> str:
        """Return a text as a part of a rule, with its special tokens; an empty one is none."""
        parts = re.split("(<[^<>]+>)", text)
        return " ".join(self._special(part) or json.dumps(part) for part in parts if part)

    def _special(self, text: str) -> str | None:
        """Return a special token for a rule if the text is its name, between < and >."""
        if not re.fullmatch("<[^<>]+>", text):
            return None
        ids = self._tokenizer.tokenize_str(text, parse_special=True)
        is_special = len(ids) == 1 and self._tokenizer.is_special_token(ids[0])
        return f"<[{ids[0]}]>" if is_special else None


def _without_unknown_formats(schema: object) -> object:
    """Return a JSON schema without formats of strings that llguidance does not know.

    JSON Schema's specification has unknown ones ignored.
    """
    if isinstance(schema, list):
        return [_without_unknown_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in _VALUES else _without_unknown_formats(value)
        for name, value in schema.items()
        if name != "format" or not isinstance(value, str) or value in _FORMATS
    }


def _of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _json_options(definition: Definition) -> dict[str, object]:
    """Return llguidance's options for the whitespace between the parts of JSON."""
    if not definition.has_whitespace:
        return {"whitespace_flexible": False}
    pattern = definition.whitespace_pattern
    return {
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITESPACE if pattern is None else pattern,
    }


def _wrong(definition: Definition, why: str) -> str:
    """Return the message for a wrong definition, which `why` may repeat as a whole."""
    if len(why) > 2 * _SHOWN_CHARS:
        why = f"{why[:_SHOWN_CHARS]} … {why[-_SHOWN_CHARS:]}"
    return f"the {definition.kind} is wrong: {why}"


class GuidedGrammar:
    """A compiled grammar, of which every output gets a copy; it ends with one of `ends`."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends

    def begin(self) -> GuidedState:
        return GuidedState(self._matcher.deep_copy(), self._ends)


class GuidedState:
    """The place in a grammar that one output has reached."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._has_ended = False

    def mask(self) -> bytes | None:
        """Return one bit for each token; None after the end.

        Raises GrammarError if the grammar needs more work in a step than is allowed.
        """
        if self._has_ended:
            return None
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(
                "within the limits of a step it cannot be found what its grammar allows next; "
                f"simplify the grammar ({self._matcher.get_error():.200})"
            )
        return mask

    def accept(self, token_id: int) -> None:
        """Go on by a token of the last mask; if that takes too much work, the next mask fails."""
        if self._has_ended:
            return
        self._has_ended = token_id in self._ends
        self._matcher.consume_token(token_id)

    def fork(self) -> GuidedState:
        other = GuidedState(self._matcher.deep_copy(), self._ends)
        other._has_ended = self._has_ended
        return other
