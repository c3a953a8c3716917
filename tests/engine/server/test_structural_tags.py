"""Both of vLLM's forms of structural tags ask for the same grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slosched.engine.server.errors import ApiError
from slosched.engine.server.structured import parse_structured_output

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
OLDER = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [{"begin": "<f=add>", "schema": SCHEMA, "end": "</f>"}],
}


def newer(**changes: Any) -> dict[str, Any]:
    tag = {
        "type": "tag",
        "begin": "<f=add>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</f>",
    }
    tags = {"type": "triggered_tags", "triggers": ["<f="], "tags": [{**tag, **changes}]}
    return {"type": "structural_tag", "format": {**tags, "stop_after_first": False}}


def test_both_forms_in_both_fields_are_one_grammar() -> None:
    bodies: list[dict[str, Any]] = [
        {"response_format": OLDER},
        {"response_format": newer()},
        {"structured_outputs": {"structural_tag": OLDER}},
        {"structured_outputs": {"structural_tag": json.dumps(newer())}},
    ]
    found = [parse_structured_output(body) for body in bodies]
    assert found[0] is not None
    assert {one.definition for one in found if one is not None} == {found[0].definition}
    assert None not in found


def test_an_answer_may_end_after_its_first_tag() -> None:
    wanted = newer()
    wanted["format"]["stop_after_first"] = True
    found = parse_structured_output({"response_format": wanted})
    assert found is not None
    assert json.loads(found.definition.text)["stops_after_first"] is True


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"begin": "<g>"}, "begin"),
        ({"end": ["</f>", "</g>"]}, "end"),
        ({"content": {"type": "any_text"}}, "content"),
        ({"content": {"type": "json_schema", "json_schema": 7}}, "schema"),
    ],
)
def test_what_only_the_newer_form_can_say_is_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_structured_output({"response_format": newer(**changes)})
    assert caught.value.param == f"response_format.format.tags.{param}"


def test_another_format_is_refused_with_what_to_send_instead() -> None:
    wanted = {"type": "structural_tag", "format": {"type": "sequence", "elements": []}}
    with pytest.raises(ApiError, match=r"'triggered_tags', not 'sequence'.*json_schema.*regex"):
        parse_structured_output({"response_format": wanted})


def test_a_type_of_any_length_is_told_by_its_beginning() -> None:
    wanted = {"type": "structural_tag", "format": {"type": [0] * 100_000}}
    with pytest.raises(ApiError, match=r"not \[0, 0, 0") as caught:
        parse_structured_output({"response_format": wanted})
    assert len(caught.value.message) < 1000
