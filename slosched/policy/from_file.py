"""A policy class from a file by its path, as in `my_policy.py` or `my_policy.py:MyPolicy`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from slosched.core import Policy


def is_file(head: str) -> bool:
    """Tell whether the first part of a policy's spec names a file rather than a module."""
    return head.endswith(".py")


def policy_class_in(path: Path, name: str | None = None) -> type[Policy]:
    """Return the policy class `name` of a file; without a name the only one that it defines.

    Raises ValueError if there is no such class, or a choice of several; OSError if there is no such
    file; and whatever the file itself raises while it is imported.
    """
    module = _module_of(path.resolve(strict=True))
    own = {
        found.__name__: found
        for found in vars(module).values()
        if isinstance(found, type)
        and issubclass(found, Policy)
        and found.__module__ == module.__name__
    }
    if name is None and len(own) == 1:
        return next(iter(own.values()))
    if not own:
        raise ValueError(f"{path} defines no subclass of slosched.Policy")
    if name is None:
        choices = ", ".join(f"{path}:{each}" for each in own)
        raise ValueError(f"{path} defines several policies: name one, as in {choices}")
    if name not in own:
        raise ValueError(f"{path} defines no policy {name!r}; it defines {', '.join(own)}")
    return own[name]


def _module_of(path: Path) -> ModuleType:
    """Import a file once, under a name that no installed module has.

    As for a script, modules that lie beside it can be imported.
    """
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path  # it ends in .py
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
