"""CPU time to compile grammars for SmolLM2's 49,152 tokens, and to find masks along random outputs.

python benchmarks/grammars.py
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from transformers import AutoTokenizer

from slosched.core import GrammarError
from slosched.engine.grammar import Definition, GuidanceCompiler, Kind
from slosched.engine.torch.embedded import embedded_model_dir

T = TypeVar("T")
_END = 2

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "age", "tags"],
}


def _with_patterns(num_properties: int) -> dict[str, Any]:
    patterns = {
        f"p{i}": {"type": "string", "pattern": f"[a-z]{{1,{i % 50 + 1}}}{i}"}
        for i in range(num_properties)
    }
    return {"type": "object", "properties": patterns}


DEFINITIONS = {
    "a person (JSON schema)": Definition(Kind.JSON_SCHEMA, json.dumps(_PERSON)),
    "any JSON object": Definition(Kind.JSON_SCHEMA, '{"type": "object"}'),
    "100 properties with patterns": Definition(Kind.JSON_SCHEMA, json.dumps(_with_patterns(100))),
    "1,100 properties with patterns": Definition(
        Kind.JSON_SCHEMA, json.dumps(_with_patterns(1100))
    ),
    "one of 3,000 texts": Definition(Kind.CHOICE, json.dumps([f"text {i}" for i in range(3000)])),
    "words (regular expression)": Definition(Kind.REGEX, r"(\w+\s?){1,500}"),
    "an ambiguous grammar": Definition(Kind.GRAMMAR, 'start: s\ns: s s | s s s | "a" | "b"'),
}


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the milliseconds of CPU time that a call takes, and what it returns."""
    began_s = time.process_time()
    value = call()
    return 1000 * (time.process_time() - began_s), value


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir())
    text = tokenizer.backend_tokenizer.to_str()
    took_ms, compiler = timed(lambda: GuidanceCompiler(text, len(tokenizer), {_END}))
    print(f"reading the vocabulary: {took_ms:.0f} ms")
    print(f"{'':32} compile    masks: mean     worst ms")
    for name, definition in DEFINITIONS.items():
        draw = random.Random(1)
        compile_ms, grammar = timed(partial(compiler.compile, definition))
        state, times_ms, note = grammar.begin(), [], ""
        try:
            for _ in range(200):
                took_ms, mask = timed(state.mask)
                times_ms.append(took_ms)
                if mask is None:
                    break
                bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
                token_id = int(draw.choice(np.nonzero(bits)[0]))
                took_ms, _ = timed(partial(state.accept, token_id))
                times_ms[-1] += took_ms
        except GrammarError:
            note = f"  refused after {len(times_ms)} tokens: too much work for a step"
        mean_ms = sum(times_ms) / max(1, len(times_ms))
        worst_ms = max(times_ms, default=0.0)
        print(f"{name:32} {compile_ms:7.1f} {mean_ms:14.3f} {worst_ms:9.1f}{note}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # for --help
    main()
