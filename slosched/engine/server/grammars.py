"""The queue of requests that wait for their grammar, apart from those that policies see.

SGLang has such a queue, too.  A request comes to the scheduler when its grammar is compiled, but
its deadlines count from its arrival.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

from slosched.core import GrammarError, OutputGrammar
from slosched.engine.grammar import Definition, GrammarCompiler
from slosched.engine.server.errors import ApiError
from slosched.engine.server.prometheus import Histogram, sample
from slosched.engine.server.structured import StructuredOutput

_NUM_KEPT = 64
"""Compiled grammars that are kept for requests with the same definition."""
_MOST_LEFT_BEHIND = 2
"""Threads that may go on with a grammar beyond its time limit while others are compiled."""

_Job = tuple[Definition, Future[OutputGrammar]]


class _Compiling:
    """A thread that compiles the grammars of a queue one after the other, until None comes.

    It is a daemon: a compilation cannot be stopped, and must not keep the process from its end.
    """

    def __init__(self, compiler: GrammarCompiler, todo: SimpleQueue[_Job | None]) -> None:
        self.began_s: float | None = None
        """When it began to compile; None between two grammars."""
        self.result: Future[OutputGrammar] | None = None
        """That of the grammar which it compiles, or has compiled last."""
        self.is_left_behind = False
        """Whether another thread goes on with the queue."""
        self._compiler, self._todo = compiler, todo
        self._thread = threading.Thread(target=self._run, name="slosched-grammar", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self.is_left_behind and (job := self._todo.get()) is not None:
            definition, result = job
            if not result.set_running_or_notify_cancel():
                continue
            self.result, self.began_s = result, time.monotonic()
            try:
                grammar = self._compiler.compile(definition)
            except BaseException as error:
                self.began_s = None
                result.set_exception(error)
            else:
                self.began_s = None  # before anybody can ask for the next one
                result.set_result(grammar)


class GrammarQueue:
    """Compiles grammars in a thread of their own.  Only the event loop's thread may call it.

    A few grammars that take longer than `time_limit_s` do not keep others waiting: their thread is
    left behind with each.

    A request gets an error if its grammar is not there within `time_limit_s`, or if `max_waiting`
    requests wait before it.  A later one is told to come again after `retry_after_s`.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        retry_after_s: float,
        *,
        time_limit_s: float = 10.0,
        max_waiting: int = 1024,
    ) -> None:
        self._compiler = compiler
        self._retry_after_s = retry_after_s
        self._time_limit_s = time_limit_s
        self._max_waiting = max_waiting
        self._todo: SimpleQueue[_Job | None] = SimpleQueue()
        weakref.finalize(self, self._todo.put, None)
        # One thread, so that grammars take one core from the engine, unless one takes too long.
        self._compiling: _Compiling | None = None
        self._left_behind: list[_Compiling] = []
        self._jobs: OrderedDict[Definition, Future[OutputGrammar]] = OrderedDict()
        self._num_waiting = 0
        self._num_waiting_for: Counter[Future[OutputGrammar]] = Counter()
        self._wait = Histogram("slosched:grammar_wait_seconds", "Waiting for a grammar.")

    async def compiled(self, wanted: StructuredOutput) -> OutputGrammar:
        """Return the compiled grammar.

        Raises ApiError (400) if it is wrong or takes too long to compile, (503) if others were
        compiled before it for too long.
        """
        began_s = time.monotonic()
        job = self._job(wanted.definition)
        is_next = self._is_next(job)
        self._num_waiting += 1
        self._num_waiting_for[job] += 1
        try:
            async with asyncio.timeout(self._time_limit_s):
                # Shielded, since others may wait for the same grammar.
                return await asyncio.shield(asyncio.wrap_future(job))
        except GrammarError as error:
            raise ApiError(400, f"{wanted.param}: {error}", param=wanted.param) from error
        except TimeoutError:
            is_slow = is_next and job.running()
            self._see_that_others_are_compiled(job if is_slow else None)
            raise self._too_late(is_slow, wanted.param) from None
        finally:
            self._num_waiting -= 1
            self._leave(wanted.definition, job)
            self._wait.observe(time.monotonic() - began_s)

    def _job(self, definition: Definition) -> Future[OutputGrammar]:
        """Return the compilation of a grammar, which may have ended long ago."""
        job = self._jobs.get(definition)
        if job is None:
            if self._num_waiting >= self._max_waiting:
                raise self._busy(f"{self._num_waiting} requests wait for their grammar")
            job = self._jobs[definition] = Future()
            self._see_that_one_compiles()
            self._todo.put((definition, job))
            if len(self._jobs) > _NUM_KEPT:
                self._jobs.popitem(last=False)
        self._jobs.move_to_end(definition)
        return job

    def _see_that_one_compiles(self) -> None:
        """Start a thread if there is none, or in the place of one that takes too long."""
        compiling = self._compiling
        if compiling is not None:
            began_s = compiling.began_s
            if began_s is not None and time.monotonic() - began_s >= self._time_limit_s:
                self._leave_behind(compiling)
        else:
            self._compiling = _Compiling(self._compiler, self._todo)

    def _see_that_others_are_compiled(self, slow: Future[OutputGrammar] | None) -> None:
        """Leave a thread behind that compiles `slow`, whatever it says of when it has begun.

        On a busy machine that is later than when the request for it began to wait.
        """
        compiling = self._compiling
        if slow is not None and compiling is not None and compiling.result is slow:
            self._leave_behind(compiling)
        else:
            self._see_that_one_compiles()

    def _leave_behind(self, compiling: _Compiling) -> None:
        """Go on with the queue in another thread, unless too many are left behind."""
        self._left_behind = [each for each in self._left_behind if each.is_alive]
        if len(self._left_behind) < _MOST_LEFT_BEHIND:
            compiling.is_left_behind = True
            self._left_behind.append(compiling)
            self._compiling = _Compiling(self._compiler, self._todo)

    def _is_next(self, job: Future[OutputGrammar]) -> bool:
        """Tell whether no other grammar is compiled before this one."""
        compiling = self._compiling
        is_idle = compiling is None or compiling.began_s is None
        others = (other for other in self._num_waiting_for if other is not job)
        return job.running() or (is_idle and all(other.done() for other in others))

    def _leave(self, definition: Definition, job: Future[OutputGrammar]) -> None:
        """Note that a request waits no longer; a job that nobody waits for does not begin."""
        self._num_waiting_for[job] -= 1
        if self._num_waiting_for[job]:
            return
        del self._num_waiting_for[job]
        if job.cancel() and self._jobs.get(definition) is job:
            del self._jobs[definition]

    def _too_late(self, is_slow: bool, param: str) -> ApiError:
        if is_slow:
            return ApiError(
                400,
                f"{param}: the grammar was not compiled within {self._time_limit_s:g} s; simplify "
                "it",
                param=param,
            )
        return self._busy(f"for {self._time_limit_s:g} s other grammars were compiled")

    def _busy(self, why: str) -> ApiError:
        return ApiError(
            503,
            f"the grammar was not compiled: {why}",
            kind="service_unavailable",
            code="grammars_busy",
            retry_after_s=self._retry_after_s,
        )

    def lines(self, label: str) -> Iterator[str]:
        """Yield the metrics of the queue."""
        text = "Requests that wait for their grammar."
        name = "slosched:num_requests_waiting_for_grammar"
        yield from sample(name, "gauge", text, label, self._num_waiting)
        yield from self._wait.lines(label)
