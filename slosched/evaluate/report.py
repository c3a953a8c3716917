"""A report in one HTML file: text, tables and figures, with nothing to load from elsewhere."""

from __future__ import annotations

import io
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, TypeAlias, Union

import pandas as pd

import slosched

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Block: TypeAlias = Union[str, pd.DataFrame, "Figure"]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the blocks under it, in order.

    Text is plain, and blank lines separate its paragraphs.  A table shows its index only if the
    index has a name.
    """

    heading: str
    blocks: Sequence[Block]


def write_report(
    path: str | Path,
    title: str,
    sections: Sequence[Section],
    provenance: Mapping[str, object] | None = None,
) -> None:
    """Write the report to `path`, and make its folder.

    The page ends with `provenance`, to which the date and the versions that made it are added.
    """
    if not sections:
        raise ValueError(f"report {title!r} has no sections to write")
    facts = {**(provenance or {}), **_made_by()}
    template = Template(
        files("slosched.evaluate").joinpath("report.html").read_text(encoding="utf-8")
    )
    numbered = list(enumerate(sections, start=1))
    page = template.substitute(
        title=escape(title),
        contents="\n".join(f'<a href="#s{i}">{escape(s.heading)}</a>' for i, s in numbered),
        sections="\n".join(_section(i, section) for i, section in numbered),
        provenance="\n".join(
            f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items()
        ),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _made_by() -> dict[str, str]:
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "slosched": slosched.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }


def _section(number: int, section: Section) -> str:
    blocks = [_block(block, f"s{number}-{i}") for i, block in enumerate(section.blocks)]
    heading = f'<h2 id="s{number}">{escape(section.heading)}</h2>'
    return "\n".join(["<section>", heading, *blocks, "</section>"])


def _block(block: Block, name: str) -> str:
    """Return the HTML of one block; `name` is unique in the page."""
    if isinstance(block, str):
        paragraphs = re.split(r"\n\s*\n", block.strip())
        return "\n".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
    if isinstance(block, pd.DataFrame):
        return _table(block)
    from matplotlib.figure import Figure  # slow, and a report without figures needs none

    if isinstance(block, Figure):
        return f"<figure>\n{_svg(block, name)}\n</figure>"
    raise TypeError(f"a report holds text, DataFrames and Figures, not {type(block).__name__}")


def _table(table: pd.DataFrame) -> str:
    shown = table.reset_index() if table.index.name is not None else table
    head = "".join(f"<th>{escape(str(column))}</th>" for column in shown.columns)
    rows = (
        f"<tr>{''.join(_cell(value) for value in row)}</tr>"
        for row in shown.itertuples(index=False, name=None)
    )
    body = "\n".join(rows)
    return (
        '<div class="table"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cell(value: object) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f"<td>{escape(_number(value))}</td>"


def _number(value: object) -> str:
    """Write fractions with four significant digits, whole numbers with all, and none as a dash."""
    if value is None or value is pd.NA or value is pd.NaT:
        return "–"
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        whole = f"{value:,.0f}"
        return whole if abs(value) >= 1000 and math.isfinite(value) else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element whose ids begin with `name`, to be unique in the page."""
    import matplotlib as mpl  # a figure has imported it

    buffer = io.StringIO()
    # Text stays text: it can be searched, and the file is a third of the size.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg).strip()
