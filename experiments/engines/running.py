"""Runs of several studies, one after the other, whose results are written as they end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from experiments.engines import results
from experiments.engines.study import Scale, Study
from slosched.cli.console import progress_bar


def run_studies(
    studies: Mapping[str, Study], only: str | None, scale: Scale, folder: Path, experiment: str
) -> None:
    """Play the studies that `only` names, separated by commas, or all, and write their results.

    Raises ValueError for a name that is none of `studies`.
    """
    names = [name.strip() for name in only.split(",")] if only else list(studies)
    if unknown := [name for name in names if name not in studies]:
        raise ValueError(f"no study {', '.join(unknown)}; there are {', '.join(studies)}")
    with progress_bar() as progress:
        for name in names:
            study, begin_s = studies[name], time.process_time()
            num_cases = sum(1 for _ in study.cases(scale))
            rows = list(progress.track(study.measure(scale), num_cases, description=study.title))
            facts = {
                "num_windows": scale.num_windows,
                "window_requests": scale.window_requests,
                "seconds": time.process_time() - begin_s,
            }
            results.write(name, rows, facts, folder, experiment)
