"""Log lines with time, level and request id, as text for people or as JSON for collectors."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from enum import StrEnum

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request that the running code serves; None outside of any."""
_STDOUT, _STDERR = 1, 2
"""File descriptors; Python's own files keep what cannot be written, and fail at the end."""
_PLAIN = frozenset("-_.:/,+@%()[]{}*|<>&;#~^!?$'")
"""Characters besides letters and digits that a text value may have without quotation marks."""


class LogFormat(StrEnum):
    """The forms of a log line."""

    TEXT = "text"
    JSON = "json"


def configure_logging(form: LogFormat) -> None:
    """Write the log lines of this process to stderr in this form, from now on.

    Other libraries are heard from level WARNING on, slosched itself from INFO on.
    """
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("slosched").setLevel(logging.INFO)


class StderrHandler(logging.Handler):
    """Writes lines to stderr, and goes on without them while they cannot be written.

    That is said once, on stdout, which may still be written.  When the log can be written again, it
    says how many lines are missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_missing = 0
        """Lines that were never written."""
        self._num_missing_here = 0
        """Those of them that the log has yet to be told of."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, after one that says how many lines are missing before it, if any are."""
        try:
            lines = [self.format(record)]
            if self._num_missing_here:
                lines.insert(0, self.format(_missing(self._num_missing_here)))
        except Exception:
            self.handleError(record)
            return
        try:
            _write(_STDERR, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            self._miss(error)
        else:
            self._num_missing_here = 0

    def _miss(self, error: OSError) -> None:
        self.num_missing += 1
        self._num_missing_here += 1
        if self._num_missing_here == 1:
            with suppress(OSError):
                text = f"the log cannot be written ({error.strerror}); serving goes on without it"
                _write(_STDOUT, f"{text}\n")


def num_missing_lines() -> int:
    """Return how many log lines of this process could not be written."""
    handlers = logging.getLogger().handlers
    return sum(each.num_missing for each in handlers if isinstance(each, StderrHandler))


def log_fields(
    logger: logging.Logger, level: int, message: str, fields: Mapping[str, object]
) -> None:
    """Log a message with fields, which become `name=value` in text and members in JSON."""
    logger.log(level, "%s", message, extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """Formats a record as `time LEVEL logger [request id] message name=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = REQUEST_ID.get()
        where = record.name if request_id is None else f"{record.name} [{_value(request_id)}]"
        words = [record.getMessage(), *(f"{k}={_value(v)}" for k, v in _fields(record).items())]
        line = f"{_time(record)} {record.levelname} {where} {' '.join(words)}"
        trace = _traceback(self, record)
        return line if trace is None else f"{line}\n{trace}"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := REQUEST_ID.get()) is not None:
            document["request_id"] = request_id
        document |= _fields(record)
        if (trace := _traceback(self, record)) is not None:
            document["exception"] = trace
        return json.dumps(document, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


def _time(record: logging.LogRecord) -> str:
    """Return the time in UTC, by ISO 8601, with milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{math.floor(record.msecs):03d}Z"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    return formatter.formatException(record.exc_info) if record.exc_info else None


def _value(value: object) -> str:
    """Return a value as text, in quotation marks if it could be taken for several or for none."""
    if not isinstance(value, str):
        return json.dumps(value)
    is_plain = value and all(c.isascii() and (c.isalnum() or c in _PLAIN) for c in value)
    return value if is_plain else json.dumps(value)


def _missing(num_lines: int) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": __name__,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": f"{num_lines} log lines are missing here, which could not be written",
        }
    )


def _write(descriptor: int, text: str) -> None:
    """Write all of a text; raise OSError if that is not possible."""
    rest = text.encode(errors="backslashreplace")
    while rest:
        rest = rest[os.write(descriptor, rest) :]
