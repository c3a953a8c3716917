"""Groups of options: a dataclass that is a command's parameter becomes one flag for each field."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for typer, with each dataclass parameter replaced by its fields.

    The default of such a parameter is an instance of its class, and its values are the flags'
    defaults. So commands can share flags and still have different defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    groups = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
    spread: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in groups:
            spread += _flags_of(groups[name], parameter.default)
        else:
            spread.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in spread}
    run.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]  # what typer reads
    return run


def _flags_of(group: Any, defaults: object) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(defaults, field.name),
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
