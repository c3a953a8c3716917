"""The tables, the sentence and the files of `slosched judge`."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean

from rich.table import Table

from slosched.cli.console import table
from slosched.evaluate.judge import LOADS, Answer, Contender, Judge, Verdict
from slosched.evaluate.statistics import Interval

_OF_CLASS = {
    "ours": "goodput",
    "published": "the best published policy",
    "with dropping": "the best simple policy with dropping",
    "plain": "the best plain policy",
}
"""The classes of the arena's finalists, as sentences name them."""
_COLUMNS = (
    *("policy", "scenario", "load", "requests_per_s", "against", "rival", "ratio", "low", "high"),
    *("verdict", "share_good", "rival_share_good", "num_windows"),
)
"""The columns of the CSV file, which are the names in `rows`."""
_AT = {1.0: "at the knee", 2.0: "at 2x the knee"}


def scenario_table(judge: Judge) -> Table:
    """Return a row for each scenario and rival: ratio, interval and verdict at each load."""
    columns = ["scenario", "against"]
    columns += [part for load in LOADS for part in (f"good {_AT[load]}", "verdict")]
    made = table(f"good requests of {judge.policy} over those of its rivals", columns, ())
    made.columns[1].justify, made.columns[1].overflow = "left", "fold"
    for name in judge.knees:
        bouts = [bout for bout in judge.bouts if bout.scenario == name]
        labels = chain((name, f"  knee {judge.knees[name]:.3g}/s"), repeat(""))
        for label, (rival, contender) in zip(labels, bouts[0].rivals.items(), strict=False):
            cells = [cell for bout in bouts for cell in _cells(bout.answers.get(rival))]
            shown = _short(contender, bouts[0].rivals.values()) if rival in _OF_CLASS else rival
            made.add_row(label, shown, *cells)
        made.add_section()
    return made


def summary_table(judge: Judge) -> Table:
    """Return a row for each rival and load: counts of verdicts, and the mean shares of good."""
    rows = []
    for rival in rivals_of(judge):
        for load in LOADS:
            answers = list(_answers(judge, rival, load))
            if answers:
                counts = [sum(a.verdict is verdict for a in answers) for verdict in Verdict]
                shares = fmean(a.share for a in answers), fmean(a.rival_share for a in answers)
                rows.append([_OF_CLASS.get(rival, rival), _AT[load], *map(str, counts)])
                rows[-1] += [f"{share:.1%}" for share in shares]
    columns = ["against", "load", *map(str, Verdict), "good", "its good"]
    return table(
        f"{judge.policy}: verdicts by scenario, and mean shares of good requests", columns, rows
    )


def sentence(judge: Judge) -> str:
    """Return the verdict in words."""
    parts = [part for load in LOADS for part in _in_words(judge, load)]
    if not parts:
        return "There is no verdict yet: give more time with --time-limit."
    return f"{judge.policy}: {'; '.join(parts)}."


def rivals_of(judge: Judge) -> list[str]:
    """Return the names of the rivals, those of all scenarios together."""
    return list(dict.fromkeys(rival for bout in judge.bouts for rival in bout.rivals))


def rows(judge: Judge) -> list[dict[str, object]]:
    """Return all that was found, a row for each scenario, load and rival with an answer."""
    return [
        {
            "policy": str(bout.policy),
            "scenario": bout.scenario,
            "load": bout.load,
            "requests_per_s": bout.rate,
            "against": rival,
            "rival": str(bout.rivals[rival]),
            "ratio": answer.ratio,
            "low": answer.interval.low,
            "high": answer.interval.high,
            "verdict": str(answer.verdict),
            "share_good": answer.share,
            "rival_share_good": answer.rival_share,
            "num_windows": answer.num_windows,
        }
        for bout in judge.bouts
        for rival, answer in bout.answers.items()
    ]


def write(judge: Judge, path: Path) -> None:
    """Write the rows as CSV, or with the sentence as JSON, by the name of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = rows(judge)
    if path.suffix == ".json":
        finite = [{k: _json(v) for k, v in row.items()} for row in found]
        document = {"verdict": sentence(judge), "out_of_time": judge.is_out_of_time, "rows": finite}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows(found)


def _json(value: object) -> object:
    """Return the value; infinity and NaN, which JSON lacks, become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(contender: Contender, rivals: Iterable[Contender]) -> str:
    """Return the policy's name, or all of its spec if another rival has the same name."""
    names = [rival.policy.partition(":")[0] for rival in rivals]
    name = contender.policy.partition(":")[0]
    return name if names.count(name) == 1 else contender.policy


def _answers(judge: Judge, rival: str, load: float) -> Iterator[Answer]:
    for bout in judge.bouts:
        if bout.load == load and rival in bout.answers:
            yield bout.answers[rival]


def _cells(answer: Answer | None) -> tuple[str, str]:
    if answer is None:
        return "-", ""
    return f"{_ratio(answer.ratio)} {_interval(answer.interval)}", str(answer.verdict)


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else "∞" if value == math.inf else f"x{value:#.3g}"


def _interval(interval: Interval) -> str:
    low, high = ("∞" if value == math.inf else f"{value:#.3g}" for value in interval)
    return f"[{low}, {high}]"


def _in_words(judge: Judge, load: float) -> Iterator[str]:
    """Yield who is beaten, who is not, and who is both, at one load."""
    by_verdict: dict[str, list[str]] = {}
    for rival in rivals_of(judge):
        verdicts = [answer.verdict for answer in _answers(judge, rival, load)]
        if verdicts:
            bouts = [bout for bout in judge.bouts if bout.load == load and rival in bout.rivals]
            said = _overall(verdicts, len(bouts))
            by_verdict.setdefault(said, []).append(_OF_CLASS.get(rival, rival))
    for i, (said, names) in enumerate(by_verdict.items()):
        yield f"{_AT[load] + ' ' if i == 0 else ''}{said} {_and(names)}"


def _overall(verdicts: Sequence[Verdict], num_scenarios: int) -> str:
    """Return in words the verdicts of those scenarios that were played."""
    is_ahead, is_behind = Verdict.AHEAD in verdicts, Verdict.BEHIND in verdicts
    if is_ahead and is_behind:
        return "ahead of in some scenarios and behind in others:"
    if is_ahead or is_behind:
        surely = Verdict.AHEAD if is_ahead else Verdict.BEHIND
        count = verdicts.count(surely)
        share = "every scenario" if count == num_scenarios else f"{count} of {len(verdicts)}"
        if len(verdicts) < num_scenarios:
            share += " played so far"
        return f"ahead of (in {share})" if is_ahead else f"behind (in {share})"
    if all(verdict is Verdict.LEVEL for verdict in verdicts):
        return "level with"
    return "not surely different from"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
