"""Files of rows, read on demand: CSV, JSONL, a JSON list or Parquet.

At most a buffer is read ahead, so a file may be larger than memory.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path

from slosched.workload.readers.json_items import json_items
from slosched.workload.readers.rows import BadRows, Row, RowError, short
from slosched.workload.request import TraceError

HEADER_KEY = "slosched_trace"
"""Key of our own header: in the JSON object on top, or in the metadata of Parquet."""
_PARQUET_MAGIC = b"PAR1"
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"PK\x03\x04": "unzip",
}
"""First bytes of compressed files, and the command that unpacks them."""
_LONGEST_CELL = 1 << 24
"""Characters of the longest cell of CSV: all prefix hashes of the longest prompt, with blocks of 16
tokens and 19 digits a hash.  Python's own limit is 128 KiB: those of 105,000 tokens."""
_BATCH_ROWS = 4096
_CHUNK_BYTES = 1 << 16


@dataclass
class Reading:
    """A file that is being read: its rows, and what is known of it so far."""

    rows: Iterator[Row]
    top: list[str]
    """Lines above the rows: comments, or our own header as JSON."""
    text: Text | None
    """The text with its digest; None for Parquet, which is not read from front to back."""

    def digest(self, path: Path) -> dict[str, str | int]:
        """Return a checksum of what was read: the whole file, or its first bytes.

        Returns nothing for a Parquet file of which a part was read.
        """
        if self.text is None:
            if next(self.rows, None) is not None:
                return {}
            with path.open("rb") as file:
                return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        sha256, num_bytes = self.text.sha256.hexdigest(), self.text.num_bytes
        if num_bytes == path.stat().st_size:
            return {"sha256": sha256}
        return {"sha256_of_first_bytes": sha256, "first_bytes": num_bytes}


class Text:
    """A text file, read by lines or by chunks, with a running digest."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()
        self._path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def lines(self) -> Iterator[str]:
        """Yield lines without their ends.

        `str.splitlines` would also split at characters that JSON text may contain.
        """
        for raw in self._file:
            yield self._decode(raw).rstrip("\r\n")
        self._decode(b"")

    def chunks(self) -> Iterator[str]:
        while raw := self._file.read(_CHUNK_BYTES):
            yield self._decode(raw)
        self._decode(b"")

    def _decode(self, raw: bytes) -> str:
        self.sha256.update(raw)
        self.num_bytes += len(raw)
        try:
            return self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            raise TraceError(f"{self._path} is not a text file: {error}") from None


def read_rows(path: Path, file: BufferedReader, bad: BadRows) -> Reading:
    """Open the rows of a file; blank lines and `#` lines above the data are not rows.

    Raises TraceError for compressed files.
    """
    ahead = file.peek(_CHUNK_BYTES)
    if ahead.startswith(_PARQUET_MAGIC):
        return _parquet(path)
    for magic, unpack in _COMPRESSED.items():
        if ahead.startswith(magic):
            raise TraceError(f"{path} is compressed: unpack it first (`{unpack} {path.name}`)")
    text = Text(path, file)
    if _opening(ahead) == b"[":
        return Reading(json_items(path, text.chunks(), bad), [], text)
    lines = text.lines()
    top, first = [], None
    for line in lines:
        if line.strip() and line[0] != "#":
            first = line
            break
        top.append(line)
    if first is None:
        return Reading(iter(()), top, text)
    number, lines = len(top) + 1, chain((first,), lines)
    if first.lstrip()[0] != "{" and path.suffix != ".jsonl":
        return Reading(_csv_rows(path, lines, number, bad), top, text)
    return Reading(_json_rows(path, lines, number, bad), [*top, first], text)


def _opening(ahead: bytes) -> bytes:
    """Return the first character that is neither blank nor in a comment."""
    for line in ahead.removeprefix(codecs.BOM_UTF8).splitlines():
        if line.strip() and not line.startswith(b"#"):
            return line.lstrip()[:1]
    return b""


def _json_rows(path: Path, lines: Iterator[str], first: int, bad: BadRows) -> Iterator[Row]:
    for number, line in enumerate(lines, start=first):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
            bad.add(RowError(f"{place}: not JSON ({error}): {line[:80]!r}", "not JSON"))
            continue
        if not isinstance(values, dict):
            what = f"expected a JSON object, not {short(values)}"
            bad.add(RowError(f"{place}: {what}", "no object"))
        elif not (number == first and HEADER_KEY in values):
            yield Row(path, number, values)


def _csv_rows(path: Path, lines: Iterator[str], first: int, bad: BadRows) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(lines)
    try:
        columns = [column.strip() for column in next(reader)]
        if twice := [name for name, count in Counter(columns).items() if name and count > 1]:
            raise TraceError(f"{path} has two columns {twice[0]!r}: leave one of them out")
        for cells in reader:
            number = first - 1 + reader.line_num
            if len(cells) == len(columns):
                yield Row(path, number, dict(zip(columns, cells, strict=True)))
            elif cells:
                what = f"{len(cells)} values {short(cells)}"
                wanted = f"expected {len(columns)}: {', '.join(columns)}"
                bad.add(RowError(f"{path}, line {number}: {what}; {wanted}", "number of values"))
    except csv.Error as error:
        number = first - 1 + reader.line_num
        raise TraceError(f"{path}, line {number}: not CSV ({error})") from None


def _parquet(path: Path) -> Reading:
    import pyarrow  # half a second to import, only for Parquet files
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise TraceError(f"{path} is not a Parquet file that can be read: {error}") from None
    header = (file.schema_arrow.metadata or {}).get(HEADER_KEY.encode())
    top = [] if header is None else [header.decode("utf-8")]

    def rows() -> Iterator[Row]:
        number, batches = 0, file.iter_batches(_BATCH_ROWS)
        while True:
            try:
                batch = next(batches, None)
            except (pyarrow.ArrowException, OSError) as error:
                why = f"not Parquet that can be read: {error}"
                raise TraceError(f"{path}, row {number + 1}: {why}") from None
            if batch is None:
                return
            for values in batch.to_pylist():
                number += 1
                yield Row(path, number, values, unit="row")

    return Reading(rows(), top, None)
