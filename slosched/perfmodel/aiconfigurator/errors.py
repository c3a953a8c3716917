"""The reasons why no profile can be composed of AIConfigurator's tables."""

from __future__ import annotations

from slosched.core import SloschedError


class MissingTablesError(SloschedError):
    """AIConfigurator is not installed, or has no tables for what was asked."""


class ConfigMissingError(SloschedError):
    """The config.json of a model is neither here nor could it be downloaded."""


class NoRoomError(SloschedError):
    """The weights leave no memory for a KV cache."""
