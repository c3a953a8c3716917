"""A bout: one policy against its rivals in one scenario at one load, up to a clear answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from slosched.evaluate.judge.play import Task
from slosched.evaluate.judge.scenarios import Contender
from slosched.evaluate.judge.sequential import (
    LOOKS,
    FloatArray,
    Look,
    Verdict,
    ratio_interval,
    ratio_of_means,
)
from slosched.evaluate.statistics import Interval


@dataclass(frozen=True)
class Answer:
    """What a look at the windows of a policy and a rival says."""

    ratio: float
    """Good requests of the policy over those of the rival."""
    interval: Interval
    share: float
    """The policy's share of good requests."""
    rival_share: float
    num_windows: int

    @property
    def verdict(self) -> Verdict:
        return Verdict.of(self.interval)


@dataclass
class Bout:
    """The windows played so far, and the answers.  Rivals with a clear answer play no more."""

    scenario: str
    load: float
    """The rate as a multiple of the knee."""
    rate: float
    policy: Contender
    rivals: Mapping[str, Contender]
    """The rivals by the name under which they are shown."""
    max_windows: float
    """The number of windows that share no request."""
    shares: dict[tuple[Contender, int], float] = field(default_factory=dict)
    """The share of good requests by contender and window."""
    answers: dict[str, Answer] = field(default_factory=dict)
    num_looks: int = 0
    """The looks that were taken."""

    @property
    def undecided(self) -> list[str]:
        """Return the rivals whose answer is not clear yet."""
        return [
            name
            for name in self.rivals
            if name not in self.answers or self.answers[name].verdict is Verdict.NOT_SURE
        ]

    @property
    def look(self) -> Look | None:
        """Return the look for which windows are being played; None if the bout is over."""
        if not self.undecided or self.num_looks == len(LOOKS):
            return None
        look = LOOKS[self.num_looks]
        return look if look.num_windows <= self.max_windows else None

    def tasks(self) -> Iterator[Task]:
        """Yield the replays that the next look needs and that were not played."""
        look = self.look
        if look is not None:
            playing = dict.fromkeys([self.policy, *(self.rivals[name] for name in self.undecided)])
            for window in range(look.num_windows):
                for contender in playing:
                    if (contender, window) not in self.shares:
                        yield Task(self.scenario, self.rate, window, contender)

    def num_left(self) -> int:
        """Return how many replays are left if no further answer becomes clear."""
        if self.look is None:
            return 0
        last = [look for look in LOOKS if look.num_windows <= self.max_windows][-1]
        playing = {self.policy, *(self.rivals[name] for name in self.undecided)}
        played = sum(contender in playing for contender, _ in self.shares)
        return last.num_windows * len(playing) - played

    def take(self, task: Task, share: float) -> bool:
        """Keep the share of a replay; look at the data and return True if it was the last one."""
        self.shares[task.contender, task.window] = share
        look = self.look
        if look is None or next(self.tasks(), None) is not None:
            return False
        for name in self.undecided:
            self.answers[name] = self._answer(self.rivals[name], look)
        self.num_looks += 1
        return True

    def _answer(self, rival: Contender, look: Look) -> Answer:
        mine, theirs = self._shares(self.policy, look), self._shares(rival, look)
        return Answer(
            ratio_of_means(mine, theirs),
            ratio_interval(mine, theirs, look.error),
            float(mine.mean()),
            float(theirs.mean()),
            look.num_windows,
        )

    def _shares(self, contender: Contender, look: Look) -> FloatArray:
        return np.array([self.shares[contender, window] for window in range(look.num_windows)])
