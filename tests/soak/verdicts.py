"""What a server promises, what was found, and whether it was kept."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verdict:
    """One promise."""

    promise: str
    found: str
    is_kept: bool


@dataclass
class Verdicts:
    """All promises of a run, in the order in which they were judged."""

    judged: list[Verdict] = field(default_factory=list)

    def judge(self, promise: str, found: str, is_kept: bool) -> None:
        self.judged.append(Verdict(promise, found, is_kept))

    def at_most(self, promise: str, found: float, limit: float, unit: str = "") -> None:
        self.judge(f"{promise}: at most {limit:g}{unit}", f"{found:.4g}{unit}", found <= limit)

    def at_least(self, promise: str, found: float, limit: float, unit: str = "") -> None:
        self.judge(f"{promise}: at least {limit:g}{unit}", f"{found:.4g}{unit}", found >= limit)

    def report(self) -> int:
        """Print a line for each promise; return the status of the process."""
        for each in self.judged:
            word = "kept  " if each.is_kept else "BROKEN"
            say(f"{word}  {each.promise:78} {each.found}")
        return 0 if all(each.is_kept for each in self.judged) else 1


def judge_odd(verdicts: Verdicts, odd: Sequence[str], whose: str) -> None:
    """Judge that there are no odd answers, and print the most frequent ones."""
    for text, number in Counter(odd).most_common(20):
        say(f"odd ({number} times): {text}")
    verdicts.at_most(f"answers that no {whose}", len(odd), 0)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def machine() -> str:
    """Return how busy the machine is."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, load of the last 1, 5 and 15 minutes: {load}"
