"""Models are the same after they were saved and loaded, and bad files give clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import make_model

from slosched.perfmodel import (
    DEFAULT_MODEL,
    AttentionWork,
    LinearModel,
    bundled_models,
    load_model,
    save_model,
)
from slosched.perfmodel.store import ModelFileError

MODEL = LinearModel(
    make_model().coefficients,
    AttentionWork.LITERAL,
    provenance={"gpu": "a GPU", "date": "2026-11-21"},
    held_out_error={"count": 12, "mape": 3.25},
)


def test_a_model_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    save_model(MODEL, path)
    loaded = load_model(path)
    for name in ("coefficients", "attention", "provenance", "held_out_error"):
        assert getattr(loaded, name) == getattr(MODEL, name)
    assert load_model(str(path)).coefficients == MODEL.coefficients


def test_an_unknown_name_lists_the_bundled_models() -> None:
    with pytest.raises(ModelFileError, match="no latency model 'h9000-gpt-7'") as caught:
        load_model("h9000-gpt-7")
    for name in bundled_models():
        assert name in str(caught.value)
    assert bundled_models()


def test_a_bundled_model_is_found_by_its_name_in_any_case() -> None:
    assert load_model("RTX4090/Llama-3.1-8B").provenance == load_model(DEFAULT_MODEL).provenance


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("rtx4090-llama-3.1-8b", "rtx4090/llama-3.1-8b"),
        ("rtx4090/llama3.1-8b", "rtx4090/llama-3.1-8b"),
        ("rtxpro6000", "rtxpro6000/llama-3.1-8b or rtxpro6000/qwen3-32b"),
        ("Qwen3-32B", "rtxpro6000/qwen3-32b"),
    ],
)
def test_a_slip_in_a_name_is_answered_with_the_names_near_it(slip: str, meant: str) -> None:
    with pytest.raises(ModelFileError, match="did you mean") as caught:
        load_model(slip)
    assert meant in str(caught.value)
    assert repr(slip) in str(caught.value)


def saved(**changes: object) -> str:
    document: dict[str, object] = {
        "format": "slosched-latency-model/2",
        "form": "linear",
        "parameters": {"attention": "exact", "coefficients": vars(MODEL.coefficients)},
    }
    return json.dumps(document | changes)


def linear(attention: str = "exact", **changes: object) -> dict[str, object]:
    return {"attention": attention, "coefficients": vars(MODEL.coefficients) | changes}


def layered(part: str, **changes: object) -> str:
    """Return the file of a bundled model, with changes in a part of its attention."""
    model = load_model("rtx4090/llama-3.1-8b")
    parameters = model.parameters()
    parameters["attention"][part] |= changes
    return saved(form=model.form, parameters=parameters)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a latency model .it is not JSON, Expecting value.*; make one: `slosched prof"),
        ("[" * 9999, "is not a latency model .it is not JSON"),
        ("[]", "is not a latency model .it is JSON, but no object"),
        ("{}", "is not a latency model .it has no 'format'.; make one: `slosched profile"),
        (saved(format="slosched-latency-model/1"), "has the format 'slosched-latency-model/1', .*"),
        (saved(form="cubic"), "has the form 'cubic'; this slosched knows linear, .*profiled-joint"),
        (saved(parameters=linear("cubic")), "'cubic' is not a valid AttentionWork"),
        (saved(parameters={}), "it has no 'coefficients'"),
        (
            saved(parameters={"attention": "exact", "coefficients": {"per_token_s": 1.0}}),
            "missing 6 required positional arguments",
        ),
        (saved(parameters=linear(c8=1)), "unexpected keyword .*'c8'"),
        (
            saved(parameters=linear(per_token_s=-1)),
            "per_token_s must be a number, finite and not negative, but is -1",
        ),
        (saved(parameters=linear(per_token_s="1")), "per_token_s must be a number, .* is '1'"),
        (layered("decode", per_request_s="3e-6"), "per_request_s must be a number, .* is '3e-6'"),
        (layered("decode", launch_s=None), "launch_s must be a number, .* is None"),
        (layered("kernel", l2_tokens=0), "not a latency model .ZeroDivisionError"),
        (saved(held_out_error_percent=3.2), "not a latency model .AttributeError"),
        (saved(provenance="my GPU"), "not a latency model .ValueError"),
    ],
)
def test_a_file_that_is_no_model_says_why(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_model(path)
    assert "mine.json" in str(caught.value)


def test_a_document_without_its_origin_still_predicts(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(saved())
    model = load_model(path)
    assert (model.provenance, model.held_out_error) == ({}, {})
    assert model.predict_prefill(64) == make_model().predict_prefill(64)


def test_a_binary_file_says_why(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelFileError, match=r"mine\.json is not a latency model"):
        load_model(path)


def test_a_directory_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no latency model"):
        load_model(tmp_path)


def test_another_format_is_read_if_one_insists(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(saved(format="slosched-latency-model/3", form="linear"))
    with pytest.raises(ModelFileError, match="or use --force"):
        load_model(path)
    assert load_model(path, force=True).predict_prefill(64) > 0
    path.write_text('{"format": "slosched-latency-model/1"}')
    with pytest.raises(ModelFileError, match="it has no 'form'"):
        load_model(path, force=True)
