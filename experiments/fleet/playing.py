"""Replays of which each row is kept at once, so that an interrupted run goes on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from slosched.cli.console import progress_bar

Row = Mapping[Hashable, object]


def play_cases(
    cases: Sequence[tuple[Any, ...]], row_of: Callable[..., Row], kept: pd.DataFrame, path: Path
) -> None:
    """Write the rows that are kept, and one of each case, to `path`, after every replay."""
    rows: list[Row] = [*kept.to_dict("records")]
    with progress_bar() as progress:
        for case in progress.track(cases, description="replaying"):
            rows.append(row_of(*case))
            pd.DataFrame(rows).to_csv(path, index=False)
