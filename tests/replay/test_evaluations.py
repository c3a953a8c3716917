"""The file of a portfolio's evaluations, and what is said of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slosched.cli.commands.explain import explain
from slosched.policy.portfolio.evaluation import Evaluation, Reason, Score
from slosched.policy.portfolio.explanation import explained
from slosched.replay.evaluations import FILE_NAME, read_evaluations, write_evaluations
from slosched.replay.files import RecordsError

BETTER = Evaluation(
    asked_s=10.0,
    counted_s=11.0,
    in_trouble=0.25,
    num_requests=160,
    num_judged=120,
    requests_per_s=16.0,
    mean_prompt_tokens=1000.0,
    mean_output_tokens=200.0,
    has_turned=True,
    scores={
        "goodput": Score(0.4, 0.3, 0.5, 0.0, 0.0, 0.0),
        "edf": Score(0.9, 0.85, 0.95, 0.5, 0.35, 0.65),
    },
    failed={"mine": "ValueError: no"},
    eliminated=("sjf",),
    before="goodput",
    chosen="edf",
    reason=Reason.BETTER,
    cpu_s=1.5,
)


def test_they_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_evaluations(tmp_path / "new", [BETTER, BETTER])
    assert read_evaluations(tmp_path / "new") == [BETTER, BETTER]


def test_an_error_names_the_file_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="the folder of a simulated replay of a portfolio"):
        read_evaluations(tmp_path)
    write_evaluations(tmp_path, [BETTER])
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write("{}")
    with pytest.raises(RecordsError, match="line 2 is not what"):
        read_evaluations(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"\xff\xfe")
    with pytest.raises(RecordsError, match=f"{FILE_NAME} is not a text file"):
        read_evaluations(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ([], r"it is \[\], not a JSON object"),
        (None, "it is None, not a JSON object"),
        ({"scores": []}, r"its scores is \[\], not a JSON object"),
        ({"scores": {"edf": 3}}, "its edf is 3, not a JSON object"),
        ({"scores": {"edf": {}}}, "it has no 'share'"),
        ({"eliminated": 7}, "its eliminated is 7, not a list of candidates"),
        ({"reason": "luck"}, "its reason is 'luck', not one of better, unsure"),
        ({"cpus": 7}, "it has 'cpus', which is no part of it"),
    ],
)
def test_what_is_no_evaluation_is_told_in_words(tmp_path: Path, change: object, says: str) -> None:
    line = {**BETTER.as_json(), **change} if isinstance(change, dict) else change
    (tmp_path / FILE_NAME).write_text(json.dumps(line) + "\n")
    with pytest.raises(RecordsError, match=rf"line 1 is not what .*{says}"):
        read_evaluations(tmp_path)


def test_every_choice_is_explained() -> None:
    text = " ".join(explained(BETTER))
    assert "From 11.0 s on edf planned in place of goodput: it was ahead by 50.0 points" in text
    assert "surely by 35.0 points" in text
    assert "The traffic had turned: only the last 120 requests were judged" in text
    assert "edf 90.0% (85.0% to 95.0%); goodput 40.0% (30.0% to 50.0%)" in text
    assert "mine could not be replayed: ValueError: no" in text
    assert "were in question: sjf." in text


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (Reason.BEST, "goodput went on: no other candidate was ahead."),
        (Reason.UNSURE, "goodput went on: edf was ahead by 50.0 points, but"),
        (Reason.TOO_FEW, "goodput went on: 120 requests are too few to judge by."),
        (Reason.NO_ANSWER, "goodput went on: there was no answer."),
    ],
)
def test_it_is_said_why_nothing_changed(reason: Reason, said: str) -> None:
    assert said in list(explained(replace(BETTER, chosen="goodput", reason=reason)))[-1]


def test_the_command_tells_what_a_replay_left(tmp_path: Path) -> None:
    command = typer.Typer()
    command.command()(explain)
    write_evaluations(tmp_path, [BETTER])
    told = " ".join(CliRunner().invoke(command, [str(tmp_path)]).output.split())
    assert "From 11.0 s on edf planned in place of goodput" in told
    assert "1 evaluations, 1 changes, 1.5 s of processor time." in told
