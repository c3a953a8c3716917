"""The form in which a model writes calls of functions among its text, as its chat template has it.

The one form that is known is that of Hermes, which Qwen and others took over: a JSON object with
`name` and `arguments` between `<tool_call>` and `</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_NAME = "probe_of_the_template"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A function.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {"x": 1}}}
_ASKED: list[Mapping[str, object]] = [{"role": "user", "content": "x"}]
_CALLED: list[Mapping[str, object]] = [
    *_ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": _CALL["id"], "content": "x"},
]
_WRITTEN = re.compile(rf"{OPENING}(\s*)(\{{.*?\}})(\s*){CLOSING}", re.DOTALL)

Render = Callable[[Sequence[Mapping[str, object]], Sequence[Mapping[str, object]]], str]


class CallForm(NamedTuple):
    """Hermes's form, with the space that a template writes in it."""

    before: str
    """What stands between `<tool_call>` and the object."""
    after: str
    """What stands between the object and `</tool_call>`."""
    is_special: bool = False
    """Whether one of `<tool_call>` and `</tool_call>` is a special token, which text without such
    tokens lacks."""

    def begin(self, name: str) -> str:
        """Return what stands before the arguments of a call of the function `name`."""
        return f'{OPENING}{self.before}{{"name": {json.dumps(name)}, "arguments": '

    @property
    def end(self) -> str:
        """Return what stands behind the arguments."""
        return f"}}{self.after}{CLOSING}"


def form_of(render: Render) -> CallForm | None:
    """Return the form of a chat template, which `render` calls with messages and tools.

    None if the template does not show functions, or writes calls in another form.
    """
    try:
        if _NAME not in render(_ASKED, [_TOOL]):
            return None
        texts = list(_WRITTEN.finditer(render(_CALLED, [_TOOL])))
    except Exception:  # a template may raise anything for messages that it does not know
        return None
    for before, text, after in (found.groups() for found in texts):
        try:
            call = json.loads(text)
        except ValueError:  # an example of the form, such as {"name": <function-name>, …}
            continue
        if call == _CALL["function"]:
            return CallForm(before, after)
    return None
