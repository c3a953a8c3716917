"""A policy from one line of text: `edf`, `edf:token_budget=256,drop=expired`, `pkg.mod:Class`.

A policy in a file is named by its path, `my_policy.py` or `my_policy.py:Class:margin=0.1`.

Wrappers follow after a plus, the innermost first: `edf:token_budget=256+early_rejection`.
The candidates of a portfolio follow after bars: `portfolio:every_s=10|goodput|edf:drop=infeasible`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_type_hints

from slosched.core import HEEDED, TRIED, Policy, SloschedError
from slosched.policy import POLICIES, WRAPPERS
from slosched.policy.from_file import is_file, policy_class_in
from slosched.policy.kit.wrapper import Wrapper
from slosched.spelling import meant, no_option

_PLUS = re.compile(r"(?<!=)\+(?=\s*[A-Za-z_])")
"""A plus sign that is not part of a number such as 1e+3."""


class PolicySpecError(SloschedError, ValueError):
    """A line of text does not name a policy."""


def make_policy(spec: str) -> Policy:
    """Return the policy that `spec` names, with its fields set accordingly.

    A policy of your own is `package.module:Class`, with options `package.module:Class:margin=0.1`.
    So is one in a file, `my_policy.py:Class`; without a class it is the only one of the file.
    Raises PolicySpecError if the text is not valid.
    """
    first, *wrappers = _parts(spec)
    policy = _made(first)
    for part in wrappers:
        policy = _made(part, policy)
    return policy


def policy_classes(spec: str) -> list[type[Policy]]:
    """Return the class of the policy and those of its wrappers."""
    return [part.policy_class for part in _parts(spec)]


def policy_fields(policy_class: type[Policy]) -> list[tuple[str, object, list[str]]]:
    """Return name, default and choices of each hyper-parameter; no choices if any value may do."""
    hints = get_type_hints(policy_class)
    return [
        (field.name, _default(field), _choices(hints[field.name]))
        for field in _fields(policy_class)
    ]


def tried_values(policy_class: type[Policy]) -> dict[str, tuple[object, ...]]:
    """Return the values that `slosched tune` tries, by hyper-parameter, with the default first."""
    return {
        field.name: field.metadata[TRIED]
        for field in _fields(policy_class)
        if TRIED in field.metadata
    }


def heeded_fields(policy: Policy) -> dict[str, str]:
    """Return the fields of `Request` that the policy uses because of an option, with that option.

    For example {"priority": "policy=priority"}. Includes those of the policy inside a wrapper.
    """
    heeded = heeded_fields(policy.inner) if isinstance(policy, Wrapper) else {}
    for option in _fields(type(policy)):
        value = getattr(policy, option.name)
        if HEEDED in option.metadata and (name := option.metadata[HEEDED].get(value)):
            heeded[name] = f"{option.name}={str(value).lower()}"
    return heeded


def values_to_try(spec: str) -> dict[str, tuple[object, ...]]:
    """Return `tried_values` of all parts; a wrapper's are named `early_rejection.max_load`."""
    return {
        part.prefix + name: values
        for part in _parts(spec)
        for name, values in tried_values(part.policy_class).items()
    }


def with_options(spec: str, options: Mapping[str, str]) -> str:
    """Return the spec with these options, named as by `values_to_try`, replacing those it had."""
    parts = _parts(spec)
    known = {part.prefix + name for part in parts for name in _names(part.policy_class)}
    if unknown := options.keys() - known:
        raise PolicySpecError(
            f"{spec} has no parameter {', '.join(sorted(unknown))}; "
            f"it has {', '.join(sorted(known)) or 'none'}"
        )
    texts = []
    for part in parts:
        given = {
            name: options[part.prefix + name]
            for name in _names(part.policy_class)
            if part.prefix + name in options
        }
        pairs = (f"{name}={value}" for name, value in {**part.options, **given}.items())
        own = ":".join(filter(None, (part.head, ",".join(pairs))))
        texts.append("|".join((own, *part.candidates)))
    return "+".join(texts)


class _Part(NamedTuple):
    """A policy or a wrapper in a spec."""

    head: str
    """The name as written: `edf` or `package.module:Class`."""
    policy_class: type[Policy]
    options: dict[str, str]
    """The options as they were written."""
    candidates: tuple[str, ...] = ()
    """The candidates of a portfolio as they were written; none for its default ones."""

    @property
    def prefix(self) -> str:
        """Return what precedes a wrapper's option names, as `early_rejection.`; "" for a policy."""
        is_wrapper = issubclass(self.policy_class, Wrapper)
        return f"{self.head.rpartition(':')[2]}." if is_wrapper else ""


def _parts(spec: str) -> list[_Part]:
    """Return the policy's part, then those of its wrappers, the innermost first."""
    first, *wrappers = (_part(text.strip()) for text in _PLUS.split(spec))
    if issubclass(first.policy_class, Wrapper):
        raise PolicySpecError(
            f"{first.head!r} wraps a policy: name one before it, as in sarathi+{first.head}"
        )
    for part in wrappers:
        if not issubclass(part.policy_class, Wrapper):
            raise PolicySpecError(
                f"{part.head!r} cannot follow a plus: it wraps no policy, as do "
                f"{', '.join(WRAPPERS)}"
            )
    return [first, *wrappers]


def _part(text: str) -> _Part:
    text, *candidates = (each.strip() for each in text.split("|"))
    head, *rest = text.split(":")
    policy_class = POLICIES.get(head) or WRAPPERS.get(head)
    if policy_class is None and is_file(head):
        named = rest.pop(0) if rest and "=" not in rest[0] else None
        policy_class = _from_file(head, named)
        head = ":".join(filter(None, (head, named)))
    if policy_class is None:
        if not rest:
            raise PolicySpecError(
                f"no policy {head!r}{meant(head, [*POLICIES, *WRAPPERS])}; there are "
                f"{', '.join(POLICIES)}, or package.module:Class or my_policy.py, "
                f"and after a plus {', '.join(WRAPPERS)}"
            )
        name = rest.pop(0)
        policy_class = _import(head, name)
        head = f"{head}:{name}"
    if candidates and not _chooses(policy_class):
        raise PolicySpecError(
            f"{head!r} chooses among no candidates; put portfolio before the bars, as in "
            f"portfolio|{text}|{'|'.join(candidates)}"
        )
    options = (_option(text, policy_class) for text in ":".join(rest).split(",") if text)
    return _Part(head, policy_class, dict(options), tuple(candidates))


def _made(part: _Part, *inner: Policy) -> Policy:
    hints = get_type_hints(part.policy_class)
    options = {name: option_value(name, text, hints[name]) for name, text in part.options.items()}
    if part.candidates:
        options["candidates"] = {spec: make_policy(spec) for spec in part.candidates}
    try:
        return part.policy_class(*inner, **options)
    except (TypeError, ValueError) as error:
        raise PolicySpecError(f"{part.head!r} makes no policy: {error}") from error


def _fields(policy_class: Any) -> Sequence[Field[object]]:
    """Return the class's options; none if it is not a dataclass.

    Policies that another one holds, as the inner one of a wrapper, are no options, and neither are
    fields that nobody may set.
    """
    held = {"inner"} if issubclass(policy_class, Wrapper) else set()
    held |= {"candidates"} if _chooses(policy_class) else set()
    found = fields(policy_class) if is_dataclass(policy_class) else ()
    return [field for field in found if field.init and field.name not in held]


def _names(policy_class: type[Policy]) -> list[str]:
    return [field.name for field in _fields(policy_class)]


def _import(module: str, name: str) -> type[Policy]:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise PolicySpecError(f"cannot import {module}:{name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicySpecError(f"{module}:{name} is not a subclass of slosched.core.Policy")
    return found


def _from_file(path: str, name: str | None) -> type[Policy]:
    try:
        return policy_class_in(Path(path), name)
    except OSError as error:
        raise PolicySpecError(f"no policy {path!r}: {error.strerror}") from error
    except (ImportError, SyntaxError, ValueError) as error:
        raise PolicySpecError(f"cannot take a policy from {path}: {error}") from error


def _option(text: str, policy_class: type[Policy]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    name = name.strip()
    known = _names(policy_class)
    if not equals or name not in known:
        raise PolicySpecError(no_option(policy_class.__name__, text, known))
    return name, value.strip()


def option_value(name: str, text: str, kind: Any) -> object:
    """Return the value of type `kind` that `text` means; raise PolicySpecError for any other."""
    if isinstance(kind, UnionType) and NoneType in kind.__args__:
        if text.lower() == "none":
            return None
        (kind, *others) = [one for one in kind.__args__ if one is not NoneType]
        kind = kind if not others else object
    if not (isinstance(kind, type) and issubclass(kind, str | int | float)):
        raise PolicySpecError(
            f"{name} cannot be set by a text: it is no bool, int, float, str or StrEnum"
        )
    try:
        return _bool(text) if kind is bool else kind(text)
    except ValueError as error:
        choices = _choices(kind)
        expected = f"one of {', '.join(choices)}" if choices else f"of type {kind.__name__}"
        raise PolicySpecError(f"{name}={text!r} is not {expected}") from error


def _bool(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if (value := values.get(text.lower())) is None:
        raise ValueError(text)
    return value


def _choices(kind: Any) -> list[str]:
    is_choice = isinstance(kind, type) and issubclass(kind, StrEnum)
    return [str(member) for member in kind] if is_choice else []


def _default(field: Field[object]) -> object:
    return None if field.default is MISSING else field.default


def _chooses(policy_class: type[Policy]) -> bool:
    """Tell whether policies of this class choose among candidates."""
    return issubclass(policy_class, POLICIES["portfolio"])
