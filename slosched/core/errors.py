"""The errors that slosched raises for a reason it can name."""

from __future__ import annotations


class SloschedError(Exception):
    """Base of the errors that slosched raises for a reason it can name."""


class IllegalPlanError(SloschedError):
    """A policy returned a plan that breaks a limit; nothing of it was carried out."""


class StalledError(SloschedError):
    """Work is pending, nothing is scheduled, and no arrival will ever change that."""


class OperationError(SloschedError):
    """What an operator asks of a running engine cannot be done; the text says why."""


class AdapterError(SloschedError):
    """A LoRA adapter cannot be read, or does not fit the model; the text says why."""
