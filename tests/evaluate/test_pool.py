"""The processes that run replays."""

from __future__ import annotations

import signal

from slosched.evaluate.capacity import local_pool


def blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def nothing() -> None:
    """Initialize nothing."""


def test_a_process_that_starts_does_not_hear_ctrl_c_and_the_parent_does() -> None:
    before = blocked()
    with local_pool(2)(nothing) as pool:
        in_worker = pool.submit(blocked).result()
    assert signal.SIGINT in in_worker
    assert signal.SIGINT not in blocked() == before
