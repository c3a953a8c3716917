"""Every notebook runs from top to bottom, and its .py and .ipynb files agree.

The `.py` is the source: edit it, then `jupytext --update --to ipynb notebooks/<name>.py`.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))
NUM_FIGURES = {"early_rejection": 4, "goodput_curves": 2, "quickstart": 5}
_PNG = b"\x89PNG\r\n\x1a\n"
_CELL_TIMEOUT_S = 500


def cells(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def test_there_are_notebooks() -> None:
    assert set(NUM_FIGURES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_both_files_say_the_same(name: str) -> None:
    source = jupytext.read(NOTEBOOKS / f"{name}.py")
    assert cells(read(name)) == cells(source)


@pytest.mark.parametrize("name", NAMES)
def test_no_output_is_committed(name: str) -> None:
    for cell in read(name).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    [
        name if name == "quickstart" else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_it_runs_and_draws(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # the kernel's start warns
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    notebook = read(name)
    client = NotebookClient(
        notebook, timeout=_CELL_TIMEOUT_S, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises CellExecutionError at the first cell that fails
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert not [out for out in outputs if out.output_type == "error"]
    assert not [out.text for out in outputs if out.get("name") == "stderr"]
    images = [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]
    pngs = [base64.b64decode(image) for image in images]
    assert len(pngs) == NUM_FIGURES[name]
    assert all(png.startswith(_PNG) and len(png) > 5000 for png in pngs)
