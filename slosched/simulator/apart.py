"""Answers to a portfolio's questions from a process of its own, so that no step waits for them.

`python -m slosched.simulator.apart` is that process.  It reads questions from its standard input
and ends when that is closed, even in the middle of a replay: it never outlives the process that
asks.  It shares no memory, thread or device with it.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection

from slosched.core import Policy
from slosched.policy.portfolio.question import Answer, Question, asking_in
from slosched.simulator.race import answer

log = logging.getLogger(__name__)

MEAN_SHARE = 0.05
"""Largest share of a core that replays take in the mean."""
PEAK_SHARE = 0.3
"""Largest share of a core that they take while they answer one question."""
_NICENESS = 10
_MOST_STARTS = 5
"""Starts of the process after which it counts as hopeless."""
_PATIENCE_S = 120.0
"""Time after which a question counts as lost, and its process is ended."""


class Apart:
    """A forecaster that answers in a process of its own.

    `ask` and `take_answer` return at once: a thread carries questions and answers.  A question is
    refused while the process is at work, and until the processor time of the last answer is at
    most `mean_share` of the time that has passed.  If the process dies, its question is lost, and
    the next one starts another.
    """

    def __init__(self, mean_share: float = MEAN_SHARE, peak_share: float = PEAK_SHARE) -> None:
        for share in (mean_share, peak_share):
            if not 0 < share <= 1:
                raise ValueError(f"a share of a core must be in (0, 1], not {share!r}")
        self._mean_share = mean_share
        self._peak_share = peak_share
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._answer: Answer | None = None
        self._is_busy = False
        self._not_before_s = -float("inf")
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        thread = threading.Thread(target=self._carry_all, name="slosched-forecasts", daemon=True)
        thread.start()

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Question) -> bool:
        if self._is_busy or time.monotonic() < self._not_before_s:
            return False
        if self._process is None and self._num_starts >= _MOST_STARTS:
            return False
        self._answer, self._is_busy = None, True
        self._questions.put(question)
        return True

    def take_answer(self) -> Answer | None:
        taken, self._answer = self._answer, None
        return taken

    def close(self) -> None:
        """End the process."""
        self._questions.put(None)

    def _carry_all(self) -> None:
        """Carry questions to the process and answers back, until `close`."""
        while (question := self._questions.get()) is not None:
            try:
                self._answer = self._carried(question)
                self._not_before_s = time.monotonic() + self._answer.cpu_s / self._mean_share
            except (OSError, EOFError, pickle.PickleError, AttributeError, TypeError) as error:
                log.warning("the process that replays traffic was lost (%r)", error)
                self._end_process()
            self._is_busy = False
        self._end_process()

    def _carried(self, question: Question) -> Answer:
        process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        to_process = Connection(os.dup(process.stdin.fileno()), readable=False)
        from_process = Connection(os.dup(process.stdout.fileno()), writable=False)
        with to_process, from_process:
            to_process.send_bytes(pickle.dumps((self._peak_share, question)))
            if not from_process.poll(_PATIENCE_S):
                raise EOFError(f"there was no answer for {_PATIENCE_S:g} s")
            found = pickle.loads(from_process.recv_bytes())
        assert isinstance(found, Answer)
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        self._num_starts += 1
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the server, which drains first
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self._process

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.kill()
        process.wait()


def rehearse_apart(policy: Policy) -> Apart | None:
    """Let `policy`, or the one that it wraps, be answered by a process if it asks a simulator."""
    asking = asking_in(policy)
    if asking is None:
        return None
    forecaster = Apart()
    asking.forecast_with(forecaster)
    return forecaster


def _serve() -> None:
    """Answer questions from standard input, in order, until it is closed."""
    os.nice(_NICENESS)
    answers = Connection(os.dup(sys.stdout.fileno()), readable=False)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a candidate prints
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    while True:
        peak_share, question = pickle.loads(asked.get())
        rest = partial(_rest, peak_share)
        answers.send_bytes(pickle.dumps(answer(question, after_each=rest)))


def _rest(peak_share: float, cpu_s: float) -> None:
    """Sleep after `cpu_s` of work, so that the work takes `peak_share` of a core in the mean."""
    time.sleep(cpu_s * (1 / peak_share - 1))


def _read(asked: queue.SimpleQueue[bytes]) -> None:
    """Hand over questions; end the process when nobody can ask any more."""
    questions = Connection(os.dup(sys.stdin.fileno()), writable=False)
    try:
        while True:
            asked.put(questions.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    _serve()
