"""The mark of tests that need AIConfigurator's tables, an optional extra."""

from __future__ import annotations

import importlib.metadata

import pytest

from slosched.perfmodel.aiconfigurator import VERSION


def _is_installed() -> bool:
    try:
        return importlib.metadata.version("aiconfigurator-core") == VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


needs_tables = pytest.mark.skipif(
    not _is_installed(), reason=f"aiconfigurator-core {VERSION} is not installed"
)
