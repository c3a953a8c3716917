"""Lines that are added to files one by one, each of them whole."""

from __future__ import annotations

from pathlib import Path


def append_line(path: Path, line: str) -> None:
    """Add a line, with its end, to a file; if that raises OSError, the file is as it was before.

    A disk that gets full takes the beginning of a line, and then nobody could read the file.
    """
    with path.open("ab", buffering=0) as file:
        data, num_written = line.encode(), 0
        try:
            while num_written < len(data):
                num_written += file.write(data[num_written:])
        except OSError:
            if num_written:
                file.truncate(file.tell() - num_written)
            raise
