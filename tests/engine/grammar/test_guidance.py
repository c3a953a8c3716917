"""Compiled grammars: which tokens they allow, and what becomes of definitions that are wrong."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from slosched.core import GrammarError, GrammarState
from slosched.engine.grammar import Definition, GuidanceCompiler, Kind
from slosched.engine.torch.tiny import tiny_tokenizer

END = 2
VOCAB_SIZE = 300
"""More than the 259 tokens of the tokenizer, as models with padded embeddings have."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend: Tokenizer = tiny_tokenizer().backend_tokenizer
    return backend


SPECIAL = "<|im_start|>"
"""The name of a special token."""


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GuidanceCompiler:
    return GuidanceCompiler(tokenizer.to_str(), VOCAB_SIZE, {END})


def allowed(state: GrammarState) -> list[int]:
    mask = state.mask()
    assert mask is not None
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.nonzero(bits)[0]]


def follows(compiler: GuidanceCompiler, definition: Definition, ids: list[int]) -> bool:
    """Tell whether an output of these tokens and the end follows the grammar."""
    state = compiler.compile(definition).begin()
    for token_id in [*ids, END]:
        if token_id not in allowed(state):
            return False
        state.accept(token_id)
    return state.mask() is None


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

TAGS = [
    {
        "trigger": "<f=",
        "begin": f"<f={name}>",
        "schema": {
            "type": "object",
            "properties": {field: {"type": kind}},
            "required": [field],
            "additionalProperties": False,
        },
        "end": "</f>",
    }
    for name, field, kind in (("add", "n", "integer"), ("say", "text", "string"))
]


SECRET = {
    "type": "object",
    "properties": {
        "format": {"type": "string", "format": "password", "writeOnly": True},
        "kind": {"const": {"format": "odd"}},
    },
    "required": ["format", "kind"],
    "additionalProperties": False,
}


def tagged(*tags: dict[str, Any], stops_after_first: bool = False) -> str:
    return json.dumps({"tags": tags, "stops_after_first": stops_after_first})


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        (
            Definition(Kind.JSON_SCHEMA, json.dumps(SCHEMA)),
            [
                '{"name":"é\\n","age":3}',
                '{\n  "name": "", "age": 0 }',
                '{"name":' + 32 * " " + '"","age":0}',
            ],
            [
                '{"name":"x"}',
                '{"age":3,"name":"x"}',
                '{"name":"x","age":-1}',
                "[]",
                "",
                '{"name":' + 33 * " " + '"","age":0}',
            ],
        ),
        (
            Definition(Kind.JSON_SCHEMA, '{"type": "object"}', has_whitespace=False),
            ['{"a":[1,{"b":null}]}', "{}"],
            ['{"a": 1}', "[1]"],
        ),
        (
            Definition(Kind.JSON_SCHEMA, '{"type": "array"}', whitespace_pattern=" "),
            ["[ 1 , 2 ]"],
            ["[\n1,2]", "[1,  2]"],
        ),
        (
            Definition(Kind.JSON_SCHEMA, '{"type": "array"}', whitespace_pattern=""),
            ["[1,2]"],
            ["[ 1,2]", "[1, 2]"],
        ),
        (  # what pydantic writes for a list of dates, and for a SecretStr beside a Literal
            Definition(Kind.JSON_SCHEMA, '{"items": {"type": "string", "format": "date"}}'),
            ['["2026-11-28"]', "[]"],
            ['["today"]'],
        ),
        (
            Definition(Kind.JSON_SCHEMA, json.dumps(SECRET)),
            ['{"format":"x","kind":{"format":"odd"}}'],
            ['{"format":1,"kind":{"format":"odd"}}', '{"format":"x","kind":{}}'],
        ),
        (Definition(Kind.REGEX, r"a+\d{2}"), ["aa07"], ["a1", "a123", "07"]),
        (Definition(Kind.REGEX, r"^(ja|nein)$"), ["ja", "nein"], ["jan", "j"]),
        (
            Definition(Kind.CHOICE, '["\\u00e9", "b\\"c\\n", "bc"]'),
            ["é", 'b"c\n', "bc"],
            ["b", "c"],
        ),
        (
            Definition(Kind.CHOICE, json.dumps([r"a.[b]*\d", "(?i)x|y", "~&-#^$ {1}+"])),
            [r"a.[b]*\d", "(?i)x|y", "~&-#^$ {1}+"],
            [r"aa[b]*\d", "X", "x", "a.b7"],
        ),
        (
            Definition(Kind.CHOICE, json.dumps([f"text {i}" for i in range(3000)])),
            ["text 0", "text 2999"],
            ["text 3000", "text"],
        ),
        (
            Definition(Kind.STRUCTURAL_TAGS, tagged(*TAGS)),
            [
                "no call",
                "",
                '<f=add>{"n": 1}</f>',
                'first <f=add>{"n":1}</f> then <f=say>{"text": "x"}</f> and done',
                "<g a tag of another kind>",
            ],
            ['<f=add>{"n": "1"}</f>', "<f=sub>{}</f>", '<f=add>{"n": 1}', "<f=", "so <f=add> {}"],
        ),
        (
            Definition(Kind.STRUCTURAL_TAGS, tagged(*TAGS), has_whitespace=False),
            ['<f=add>{"n":1}</f>'],
            ['<f=add>{"n": 1}</f>'],
        ),
        (
            Definition(Kind.STRUCTURAL_TAGS, tagged(*TAGS, stops_after_first=True)),
            ["", "no call <f", 'so <f=add>{"n":1}</f>'],
            ['<f=add>{"n":1}</f> and', '<f=add>{"n":1}</f><f=add>{"n":1}</f>', "<f=add>"],
        ),
        (Definition(Kind.GRAMMAR, 'root ::= "a" root | "b"'), ["b", "aab"], ["a", "ba"]),
        (Definition(Kind.GRAMMAR, 'start: "a" start | "b"'), ["b", "aab"], ["a", "ba"]),
    ],
)
def test_outputs_follow_their_grammar(
    compiler: GuidanceCompiler,
    tokenizer: Tokenizer,
    definition: Definition,
    good: list[str],
    bad: list[str],
) -> None:
    for text in good:
        assert follows(compiler, definition, tokenizer.encode(text).ids), text
    for text in bad:
        assert not follows(compiler, definition, tokenizer.encode(text).ids), text


@pytest.mark.parametrize(
    ("kind", "text", "written"),
    [
        (Kind.JSON_SCHEMA, json.dumps({"enum": [SPECIAL]}), f'"{SPECIAL}"'),
        (Kind.REGEX, r"<\|im_start\|>[0-9]", f"{SPECIAL}1"),
        (Kind.CHOICE, json.dumps([SPECIAL]), SPECIAL),
        (Kind.GRAMMAR, f'root ::= "{SPECIAL}" "a"', f"{SPECIAL}a"),
        (Kind.GRAMMAR, f'start: "{SPECIAL}" "a"', f"{SPECIAL}a"),
    ],
)
def test_text_may_look_like_a_special_token(
    compiler: GuidanceCompiler, tokenizer: Tokenizer, kind: Kind, text: str, written: str
) -> None:
    """Its token was all that could come next, and ended the answer or made it fail."""
    ids = [i for character in written for i in tokenizer.encode(character).ids]
    assert len(ids) == len(written)
    assert follows(compiler, Definition(kind, text), ids)


def test_any_walk_through_a_schema_is_an_instance_of_it(
    compiler: GuidanceCompiler, tokenizer: Tokenizer
) -> None:
    """The tokens are drawn at random among the allowed ones, none of them from the padding."""
    grammar = compiler.compile(Definition(Kind.JSON_SCHEMA, json.dumps(SCHEMA)))
    draw = random.Random(1)
    for _ in range(20):
        state, ids = grammar.begin(), []
        while (mask := state.mask()) is not None:
            assert len(mask) * 8 >= VOCAB_SIZE
            ids.append(draw.choice(allowed(state)))
            assert ids[-1] < 259
            state.accept(ids[-1])
        person = json.loads(tokenizer.decode(ids[:-1]))
        assert person.keys() == {"name", "age"}
        assert person["age"] >= 0


def test_outputs_of_one_grammar_do_not_disturb_each_other(
    compiler: GuidanceCompiler, tokenizer: Tokenizer
) -> None:
    [a, b] = tokenizer.encode("ab").ids
    grammar = compiler.compile(Definition(Kind.CHOICE, '["ab", "ba"]'))
    first, second = grammar.begin(), grammar.begin()
    first.accept(a)
    second.accept(b)
    assert (allowed(first), allowed(second), allowed(grammar.begin())) == ([b], [a], [a, b])


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Kind.JSON_SCHEMA, '{"type": "objekt"}', "Invalid type: objekt"),
        (Kind.JSON_SCHEMA, '{"type": "string"', "wrong"),
        (Kind.JSON_SCHEMA, '{"type": "string", "pattern": "(a"}', "unclosed group"),
        (Kind.JSON_SCHEMA, '{"not": {}}', "not"),
        (Kind.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "nowhere"),
        (Kind.JSON_SCHEMA, '{"$ref": "https://example.com/schema"}', "example.com"),
        (Kind.JSON_SCHEMA, '{"items": ' * 800 + "{}" + "}" * 800, "recursion"),
        (Kind.REGEX, "(a", "unclosed"),
        (Kind.REGEX, "a" * 65_537, "65537 characters, at most 65536"),
        (Kind.REGEX, "(" * 30_000 + ")" * 30_000, "invalid regex"),
        (Kind.REGEX, "\ud800", "surrogates"),
        (Kind.CHOICE, '["\\ud800"]', "surrogates"),
        (
            Kind.STRUCTURAL_TAGS,
            tagged({**TAGS[0], "schema": {"type": "objekt"}}),
            "Invalid type: objekt",
        ),
        (Kind.GRAMMAR, "hello", "Expected ::="),
        (Kind.GRAMMAR, "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "recursion"),
        (Kind.GRAMMAR, "start: nothing", "nothing"),
    ],
)
def test_a_wrong_definition_is_refused_with_the_reason(
    compiler: GuidanceCompiler, kind: Kind, text: str, message: str
) -> None:
    with pytest.raises(GrammarError, match=r"(?i)" + message):
        compiler.compile(Definition(kind, text))


def test_a_grammar_that_takes_too_long_in_a_step_fails_there(compiler: GuidanceCompiler) -> None:
    """Two thousand properties in any order are more than the parser may look at in one step."""
    properties = {f"p{i}": {"type": "string", "pattern": f"[a-z]{{{i}}}"} for i in range(1200)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    state = compiler.compile(Definition(Kind.JSON_SCHEMA, json.dumps(schema))).begin()

    def walk() -> None:
        draw = random.Random(1)
        while state.mask() is not None:
            state.accept(draw.choice(allowed(state)))

    with pytest.raises(GrammarError, match="simplify the grammar"):
        walk()


def test_a_model_without_an_end_token_has_no_grammars(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no token that ends an output"):
        GuidanceCompiler(tokenizer.to_str(), VOCAB_SIZE, set())
