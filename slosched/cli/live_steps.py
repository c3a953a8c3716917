"""The steps of a live server, recorded in the background with the time of each."""

from __future__ import annotations

import threading
from pathlib import Path

from slosched.perfmodel import Measurement, read_profile
from slosched.replay.recorder import RecordError, Recording, record_steps
from slosched.simulator.measured_speed import TimedStep

_LONGEST_S = 3600.0


class LiveSteps:
    """The steps that a server runs from now until it shuts down."""

    def __init__(self, url: str, path: Path) -> None:
        """Begin to write every step of the server at `url` to `path`, in a thread of its own."""
        self._path = path
        self._ended_s: list[float] = []
        self._thread = threading.Thread(target=self._record, args=(url,), daemon=True)
        self._thread.start()

    def all(self) -> list[TimedStep]:
        """Return the steps, once the server is gone; times count from the first step's end."""
        self._thread.join()
        if not self._ended_s:
            return []
        measured: tuple[Measurement, ...] = read_profile(self._path).measurements
        first_s = self._ended_s[0]
        return [
            TimedStep(ended_s - first_s, step)
            for ended_s, step in zip(self._ended_s, measured, strict=True)
        ]

    def _record(self, url: str) -> None:
        recording = Recording(self._path)

        def note(recording: Recording, elapsed_s: float) -> None:
            if recording.num_steps > len(self._ended_s):
                self._ended_s.append(elapsed_s)

        try:
            record_steps(url, recording, _LONGEST_S, note)
        except RecordError:  # what came until then is worth having
            return
