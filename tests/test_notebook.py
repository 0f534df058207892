"""The example notebook runs, cell by cell, in a real kernel."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from processes import ROOT


@pytest.mark.slow
def test_fit_trains_in_a_notebook_and_says_how_to_use_several_processes(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples/notebook/fit.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    texts = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    loss = re.search(r"validation loss ([\d.]+), files in runs/wave", texts[-2])
    assert "sin(0.5) is about 0." in texts[-2] and loss and float(loss[1]) < 0.03  # 0.01 of it is noise
    assert "Save Wave in a file, with %%writefile mine.py" in texts[-1]
    assert (tmp_path / "runs/wave/model.safetensors").exists()
