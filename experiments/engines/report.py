"""The page docs/engines.md; all its numbers and verdicts are made from the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.arena.figures import save
from experiments.engines import results
from experiments.engines.study import Finding, Study

_MANY = 3
"""Sizes of the parts, beyond which only the least and the largest are told."""
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def write(studies: Sequence[Study], folder: Path = results.HERE, page: Path = PAGE) -> None:
    """Write the page, and its figures into a folder with the same name."""
    parts = [_HEAD]
    rows = []
    for study in studies:
        frame = results.read(study.name, folder)
        findings = list(study.findings(frame))
        save(study.figure(frame), page.with_suffix("") / f"{study.name}.svg")
        rows.append((study, findings))
        made = results.who_made(study.name, folder)
        words = ("Known", "Played", "Reproduced", _verdict(findings), "Not so")
        parts.append(section(study, frame, findings, page, made, words))
    parts.insert(1, _summary(rows))
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


_HEAD = (
    "# Known behaviours of today's engines, reproduced\n\n"
    "<!-- Made by `make engines`; edit experiments/engines instead. -->\n\n"
    "slosched's `vllm_v0`, `vllm_v1`, `trtllm` and `sglang` decide as the engines' own code does, "
    "step by step ([policies](policies/vllm_v0.md)). So the known behaviours of the engines must "
    "also show in the simulator. Each section names a behaviour and its source, plays it with the "
    "engine's own defaults on consecutive parts of a public trace, and says whether it was "
    "reproduced. Each ratio comes with its 95 % interval (geometric mean over the parts, paired, "
    "Student's t). Curves are medians, and bands are the range over the parts. How to run it: "
    "[experiments/engines](../experiments/engines/README.md)."
)


def _summary(rows: Sequence[tuple[Study, Sequence[Finding]]]) -> str:
    lines = ["| what is known | reproduced |", "|---|---|"]
    lines += [f"| [{s.title}](#{anchor(s.title)}) | {_verdict(found)} |" for s, found in rows]
    return "\n".join(lines)


def _verdict(findings: Sequence[Finding]) -> str:
    num = sum(finding.agrees for finding in findings)
    if num == len(findings):
        return "yes"
    return f"in {num} of {len(findings)} settings" if num else "no"


def section(
    study: Study,
    frame: pd.DataFrame,
    findings: Sequence[Finding],
    page: Path,
    made: pd.Series,
    words: tuple[str, str, str, str, str],
) -> str:
    """Return the section of a study.

    `words` are those before statement, set-up and verdict, the verdict itself, and the mark of a
    finding that does not agree.
    """
    known, played, reproduced, verdict, not_so = words
    lines = [f"- {'' if f.agrees else f'**{not_so}:** '}{f.text}" for f in findings]
    return "\n\n".join(
        [
            f"## {study.title}",
            f"**{known}:** {study.statement} ({study.source.rstrip('.')}.)",
            f"**{played}:** {study.setup} {_parts(frame)}.",
            f"**{reproduced}:** {verdict}.",
            "\n".join(lines),
            *([study.why(frame)] if study.why else []),
            f"![{study.title}]({page.stem}/{study.name}.svg)",
            f"`{made['command']}`, {made['seconds']:.0f} s; commit {made['git_hash']}, code "
            f"{made['code_digest']}; {made['machine']}; {made['made']}; "
            f"[numbers](../experiments/{page.stem}/results/{study.name}.csv).",
        ]
    )


def _parts(frame: pd.DataFrame) -> str:
    sizes = sorted(set(frame["num_requests"]))
    if len(sizes) > _MANY:
        told = f"{sizes[0]:,} to {sizes[-1]:,}"
    else:
        told = " or ".join(f"{size:,}" for size in sizes)
    return f"{frame['window'].nunique()} parts of {told} requests"


def anchor(title: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")
