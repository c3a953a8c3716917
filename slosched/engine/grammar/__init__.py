"""Structured output: grammars that answers follow, and the compiler that prepares them.

Only `guidance.py` knows the library that does the work.
"""

from slosched.engine.grammar.definition import Definition, GrammarCompiler, Kind, NoGrammars
from slosched.engine.grammar.guidance import GuidanceCompiler, LibraryMissingError

__all__ = [
    "Definition",
    "GrammarCompiler",
    "GuidanceCompiler",
    "Kind",
    "LibraryMissingError",
    "NoGrammars",
]
