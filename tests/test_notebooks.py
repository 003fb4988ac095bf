"""The notebooks run from top to bottom, and are stored without what they print."""

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


class ThisPython(KernelSpecManager):
    """Runs kernels with the Python that runs the tests, whatever kernels are installed on the machine."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request: pytest.FixtureRequest) -> Any:
    return nbformat.read(request.param, as_version=nbformat.NO_CONVERT)


def test_there_are_notebooks():
    assert "01_mesh_and_layers.ipynb" in [path.name for path in NOTEBOOKS]


def test_stored_without_outputs(notebook: Any):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in code if cell.outputs or cell.execution_count is not None] == []


def test_runs(notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An error in any cell fails; what should hold is asserted in the cells. All traffic stays on this machine."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    manager = AsyncKernelManager(kernel_spec_manager=ThisPython(), ip="127.0.0.1")
    client = NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(cleanup_kc=True)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    printed = "".join(output.text for cell in code for output in cell.outputs if output.output_type == "stream")
    assert "Warning" not in printed
