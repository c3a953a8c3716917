"""A policy from one line of text: `edf`, `edf:token_budget=256,drop=expired`, `pkg.mod:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from typing import Any, get_type_hints

from slosched.core import TRIED, Policy, SloschedError
from slosched.policy import POLICIES


class PolicySpecError(SloschedError, ValueError):
    """A line of text names no policy."""


def make_policy(spec: str) -> Policy:
    """The policy that `spec` names, its fields set as it says.

    Your own: `package.module:Class`, with options as `package.module:Class:margin=0.1`.
    """
    head, *rest = spec.strip().split(":")
    if head in POLICIES:
        policy_class = POLICIES[head]
    elif rest:
        policy_class = _import(head, rest.pop(0))
    else:
        raise PolicySpecError(
            f"no policy {head!r}; there are {', '.join(POLICIES)}, or package.module:Class"
        )
    options = dict(_option(text, policy_class) for text in ":".join(rest).split(",") if text)
    try:
        return policy_class(**options)
    except (TypeError, ValueError) as error:
        raise PolicySpecError(f"{spec!r} makes no policy: {error}") from error


def policy_fields(policy_class: type[Policy]) -> list[tuple[str, object, list[str]]]:
    """Name, default and, where there are only a few, the choices of each hyper-parameter."""
    hints = get_type_hints(policy_class)
    return [
        (field.name, _default(field), _choices(hints[field.name]))
        for field in _fields(policy_class)
    ]


def tried_values(policy_class: type[Policy]) -> dict[str, tuple[object, ...]]:
    """What `slosched tune` tries for each hyper-parameter that says so, the default first."""
    return {
        field.name: field.metadata[TRIED]
        for field in _fields(policy_class)
        if TRIED in field.metadata
    }


def _fields(policy_class: Any) -> Sequence[Field[object]]:
    """None if its author made it no dataclass."""
    return fields(policy_class) if is_dataclass(policy_class) else ()


def _import(module: str, name: str) -> type[Policy]:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PolicySpecError(f"cannot import {module}:{name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicySpecError(f"{module}:{name} is not a subclass of slosched.core.Policy")
    return found


def _option(text: str, policy_class: type[Policy]) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    name = name.strip()
    hints = get_type_hints(policy_class)
    known = [field.name for field in _fields(policy_class)]
    if not equals or name not in known:
        raise PolicySpecError(
            f"{policy_class.__name__} has no option {text!r}; write name=value with one of "
            f"{', '.join(known) or 'none'}"
        )
    kind = hints[name]
    try:
        return name, _bool(value) if kind is bool else kind(value.strip())
    except ValueError as error:
        choices = _choices(kind)
        expected = f"one of {', '.join(choices)}" if choices else f"of type {kind.__name__}"
        raise PolicySpecError(f"{name}={value!r} is not {expected}") from error


def _bool(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if (value := values.get(text.strip().lower())) is None:
        raise ValueError(text)
    return value


def _choices(kind: type) -> list[str]:
    return [str(member) for member in kind] if issubclass(kind, StrEnum) else []


def _default(field: Field[object]) -> object:
    return None if field.default is MISSING else field.default
