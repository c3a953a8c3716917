"""The committed page of orders of eviction is that of the committed results."""

from __future__ import annotations

from itertools import product

import pandas as pd

from experiments.sessions.__main__ import PAGE, RESULTS
from experiments.sessions.cells import CELLS, EVICTIONS, SEEDS
from experiments.sessions.tables import page


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    results = pd.read_csv(RESULTS, dtype={"on_time": str})
    assert PAGE.read_text(encoding="utf-8") == page(results)
    keys = ["policy", "kv_tokens", "rate", "late", "eviction", "seed"]
    assert list(results[keys].itertuples(index=False, name=None)) == [
        (cell.policy, cell.kv_tokens, cell.rate, cell.late, order, seed)
        for cell, seed, order in product(CELLS, SEEDS, EVICTIONS)
    ]
