"""A sparse linear program that is built piece by piece, and a helper to write it over slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slosched.evaluate.bounds.prices import FloatArray

IntArray = npt.NDArray[np.int64]


class Solution(NamedTuple):
    """The optimum of a program."""

    value: float
    values: FloatArray
    """The value of each variable, shape (columns,)."""
    prices: FloatArray
    """The value of one more unit of each row's right side, shape (rows,); never negative."""


class Program:
    """The linear program max gain @ x, so that A @ x <= b and 0 <= x <= upper.

    Rows and columns are numbered from 0.
    """

    def __init__(self) -> None:
        self._gain: list[FloatArray] = []
        self._upper: list[FloatArray] = []
        self._at_most: list[FloatArray] = []
        self._entries: list[tuple[IntArray, IntArray, FloatArray]] = []
        self._num_columns = self._num_rows = 0

    def columns(self, count: int, *, gain: float = 0.0, upper: float = np.inf) -> IntArray:
        """Add `count` variables and return their numbers."""
        self._gain.append(np.full(count, gain))
        self._upper.append(np.full(count, upper))
        self._num_columns += count
        return np.arange(self._num_columns - count, self._num_columns)

    def rows(self, count: int, at_most: float | FloatArray) -> IntArray:
        """Add `count` constraints without entries and return their numbers."""
        self._at_most.append(np.broadcast_to(np.asarray(at_most, dtype=np.float64), count))
        self._num_rows += count
        return np.arange(self._num_rows - count, self._num_rows)

    def add(self, rows: IntArray, columns: IntArray, values: float | FloatArray) -> None:
        """Add entries of A; entries at the same place add up."""
        wide = np.broadcast_to(np.asarray(values, dtype=np.float64), rows.shape)
        self._entries.append((rows, columns, wide))

    def solve(self) -> Solution:
        """Solve with HiGHS.  Raises AssertionError if it finds no optimum."""
        from scipy.optimize import linprog  # slow to import
        from scipy.sparse import csr_matrix

        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = csr_matrix((values, (rows, columns)), shape=(self._num_rows, self._num_columns))
        upper = np.concatenate(self._upper)
        solved = linprog(  # type: ignore[call-overload]  # its stubs know no sparse matrix
            -np.concatenate(self._gain),
            A_ub=matrix,
            b_ub=np.concatenate(self._at_most),
            bounds=np.stack([np.zeros_like(upper), upper], axis=1),
            method="highs",
        )
        assert solved.status == 0, solved.message
        values = np.asarray(solved.x, dtype=np.float64)
        return Solution(-float(solved.fun), values, np.maximum(0.0, -solved.ineqlin.marginals))


def spread(first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """Return (owner, slot) for every slot of first[owner] … last[owner], both included."""
    counts = np.maximum(0, last - first + 1)
    owner = np.repeat(np.arange(len(first)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts - first)[owner]
