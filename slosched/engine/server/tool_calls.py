"""Calls in answers: from the text that follows the grammar to text and calls, as it comes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from slosched.engine.server.call_form import CLOSING, OPENING
from slosched.engine.server.tools import Tools

_HEAD = re.compile(r'[\s\[\]{},]*"name"\s*:\s*"([^"]*)"\s*,\s*"(?:parameters|arguments)"\s*:\s*\{')
"""What stands before the arguments of a call, with their first brace."""


class CallPart(NamedTuple):
    """New text of one call."""

    place: int
    """The place of the call among those of its answer."""
    name: str | None
    """The name of the function, in the first part of a call."""
    arguments: str


class Reader(Protocol):
    """Finds text and calls in one answer as its text comes."""

    num_calls: int
    """How many calls have begun."""

    @property
    def is_in_text(self) -> bool:
        """Tell whether what comes next may be text."""

    def push(self, text: str) -> list[CallPart | str]:
        """Return the text and the parts of calls that are in the next piece of the answer."""

    def flush(self) -> str:
        """Return the text that was held back, once the answer has ended."""


def reader_of(tools: Tools) -> Reader:
    """Return a reader for an answer that has to call the tools, or may."""
    return TextAndCallReader() if tools.is_optional else CallReader(tools.named)


class _Call:
    """Reads one call, from its head to the last brace of its arguments."""

    def __init__(self) -> None:
        self.is_over = False
        self._head = ""
        self._depth = 0
        """How many braces of the arguments are open."""
        self._is_string = self._is_escaped = False

    def read(self, text: str) -> tuple[str | None, str, str]:
        """Return the name if it is in the text, the arguments in it, and what stands behind them.

        Nothing is returned from before the name.
        """
        name, begin = None, 0
        for at, char in enumerate(text):
            if not self._depth:
                self._head += char
                head = _HEAD.fullmatch(self._head) if char == "{" else None
                if head is not None:
                    name, begin, self._depth = head[1], at, 1
            elif self._closes(char):
                self.is_over = True
                return name, text[begin : at + 1], text[at + 1 :]
        return name, text[begin:] if self._depth else "", ""

    def _closes(self, char: str) -> bool:
        """Count the next character of the arguments; return whether it is their last."""
        if self._is_string:
            self._is_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._is_string = True
        else:
            self._depth += (char == "{") - (char == "}")
        return not self._depth


class CallReader:
    """Finds the calls in an answer that is nothing else."""

    is_in_text = False

    def __init__(self, named: str | None) -> None:
        """Expect the arguments of the function `named`, or a list of calls if that is None."""
        self._named = named
        self.num_calls = 0
        self._call = _Call()

    def push(self, text: str) -> list[CallPart | str]:
        if self._named is None:
            return list(self._parts(text))
        name = None if self.num_calls else self._named
        self.num_calls = 1
        return [CallPart(0, name, text)] if text or name else []

    def flush(self) -> str:
        return ""

    def _parts(self, text: str) -> Iterator[CallPart]:
        while text:
            name, arguments, text = self._call.read(text)
            self.num_calls += name is not None
            if arguments:
                yield CallPart(self.num_calls - 1, name, arguments)
            if self._call.is_over:
                self._call = _Call()


class TextAndCallReader:
    """Finds the calls in an answer that may have text before, between and behind them.

    What may be the beginning of `<tool_call>` is held back, and so is white space, which is no text
    before a call, nor at the end of an answer that has calls.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._call: _Call | None = None
        """The call that has begun and not ended."""

    @property
    def is_in_text(self) -> bool:
        return self._call is None

    def push(self, text: str) -> list[CallPart | str]:
        parts: list[CallPart | str] = []
        while text:
            if self._call is None:
                found, text = self._text(text)
                parts += [found] if found else []
            elif not self._call.is_over:
                name, arguments, text = self._call.read(text)
                self.num_calls += name is not None
                parts += [CallPart(self.num_calls - 1, name, arguments)] if arguments else []
            else:
                text = self._skip_end(text)
        return parts

    def flush(self) -> str:
        held, self._held = self._held, ""
        if self._call is not None or (self.num_calls and held.isspace()):
            return ""
        return held

    def _text(self, text: str) -> tuple[str, str]:
        """Return the text before a call, or that can be told, and what is left to read."""
        before, opening, rest = (self._held + text).partition(OPENING)
        if opening:
            self._held, self._call = "", _Call()
            return before.rstrip(), rest
        told = before[: len(before) - _num_begun(before, OPENING)].rstrip()
        self._held = before[len(told) :]
        return told, ""

    def _skip_end(self, text: str) -> str:
        """Skip what closes a call; return what is left to read."""
        _, closing, rest = (self._held + text).partition(CLOSING)
        if closing:
            self._held, self._call = "", None
            return rest
        self._held = (self._held + text)[1 - len(CLOSING) :]
        return ""


def _num_begun(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may begin the mark."""
    return next(n for n in range(len(mark) - 1, -1, -1) if text.endswith(mark[:n]))
