"""Tests that the report is one valid, self-contained page, with any content."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from slosched.evaluate.plots import fit_plot
from slosched.evaluate.report import Section, write_report

VOID = {"meta", "br", "img"}


class Balanced(HTMLParser):
    """A parser that checks the nesting of the elements, and collects ids, links and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        links = (values.get(name) for name in ("src", "href", "xlink:href"))
        self.links += [link for link in links if link]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parsed(path) -> Balanced:
    page = Balanced()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def figure() -> Figure:
    return fit_plot(np.array([0.011, 0.019]), np.array([0.01, 0.02]))


def test_a_page_of_text_tables_and_figures(tmp_path):
    table = pd.DataFrame({"policy": ["fcfs", "<slo>"], "n": [12345, 2], "rate": [0.123456, np.nan]})
    path = tmp_path / "deep" / "report.html"
    sections = [
        Section("Fit & error", ["First.\n\nSecond <b>.", figure(), figure()]),
        Section("Table", [table, table.set_index("policy")]),
    ]
    write_report(path, "A & B", sections, {"trace": "azure<conv>", "seed": 3})
    page = parsed(path)
    assert "A & B" in page.text
    assert "Second <b>." in page.text
    assert "<slo>" in page.text
    assert "azure<conv>" in page.text
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", path.read_text(encoding="utf-8"))
    assert cells == ["fcfs", "12,345", "0.1235", "&lt;slo&gt;", "2", "–"] * 2
    for fact in ("trace", "seed", "made", "slosched", "python", "machine"):
        assert fact in page.text


def test_nothing_is_loaded_and_no_id_occurs_twice(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, "t", [Section("a", [figure(), figure()]), Section("b", [figure()])])
    page = parsed(path)
    assert len(page.ids) == len(set(page.ids))
    assert page.links
    for link in page.links:
        assert link.startswith("#")
        assert link[1:] in page.ids
    text = path.read_text(encoding="utf-8")
    for reference in re.findall(r"url\(#([^)]+)\)", text):
        assert reference in page.ids
    svgs = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    assert len(svgs) == 3
    for svg in svgs:
        ElementTree.fromstring(svg)


def test_what_is_no_block_or_no_section_is_refused(tmp_path):
    with pytest.raises(TypeError, match="not int"):
        write_report(tmp_path / "r.html", "t", [Section("a", [3])])
    with pytest.raises(ValueError, match="no sections"):
        write_report(tmp_path / "r.html", "t", [])
    assert not (tmp_path / "r.html").exists()
