"""Execute the notebooks, and write each with its outputs beside its source.

    python notebooks/execute.py [NAME ...]

`NAME.py` (percent format) is the source, `NAME.ipynb` the pair that the documentation shows.
Warnings are errors. Without names, all are executed.
"""

import argparse
import base64
import io
import os
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image
from traitlets.config import Config

HERE = Path(__file__).parent
NAMES = sorted({path.stem for path in HERE.glob("*.py")} - {"execute", "pages"})
# Small pictures, and the same file with every release of matplotlib.
PICTURES = {"figure.dpi": 80}
SAVED = {"bbox_inches": "tight", "metadata": {"Software": None}}
# Warnings are errors, but not those that the kernel gives about itself.
PARTS = "ipykernel", "IPython", "jupyter_client", "matplotlib_inline", "tornado", "traitlets"
KERNEL = "|".join(PARTS)
FILTERS = f"""
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", module=".*({KERNEL})")
del warnings
"""


class _ThisPython(AsyncKernelManager):
    """Kernels of the Python that runs this program, whichever others are registered."""

    @property
    def kernel_spec(self):
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        argv += [f"--InlineBackend.rc={PICTURES}", f"--InlineBackend.print_figure_kwargs={SAVED}"]
        argv += [f"--IPKernelApp.exec_lines={[FILTERS]}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def source(name):
    """The notebook of a source: no outputs, nothing that differs between two readings."""
    notebook = jupytext.read(HERE / f"{name}.py", fmt="py:percent")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    return notebook


def without_alpha(notebook):
    """Write the pictures without their opaque alpha channel: a tenth smaller, the same pixels."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if picture := output.get("data", {}).get("image/png"):
                image, smaller = Image.open(io.BytesIO(base64.b64decode(picture))), io.BytesIO()
                image.convert("RGB").save(smaller, "png", optimize=True)
                output["data"]["image/png"] = base64.b64encode(smaller.getvalue()).decode()


def executed(name):
    """The notebook with its outputs. The first error is raised."""
    notebook = source(name)
    metadata = dict(notebook.metadata)
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    with tempfile.TemporaryDirectory() as folder:
        # Sockets in a folder: two programs that start at once may choose the same port.
        sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}
        client = NotebookClient(
            notebook,
            kernel_manager_class=_ThisPython,
            config=Config(KernelManager=sockets),
            coalesce_streams=True,
            record_timing=False,
        )
        client.execute(cwd=str(HERE), env={**os.environ, **inline})
    without_alpha(notebook)
    notebook.metadata = metadata  # the kernel adds its versions
    return notebook


def main():
    """Execute, write, and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=NAMES, help=", ".join(NAMES))
    parser.add_argument(
        "--output", type=Path, default=HERE, help="folder, by default that of the sources"
    )
    arguments = parser.parse_args()
    names = [Path(name).stem for name in arguments.names]
    if unknown := set(names) - set(NAMES):
        parser.error(f"no such notebook: {', '.join(sorted(unknown))}")
    for name in names:
        start = time.perf_counter()
        nbformat.write(executed(name), path := arguments.output / f"{name}.ipynb")
        seconds, size = time.perf_counter() - start, path.stat().st_size / 1000
        print(f"{path.name}: {seconds:.0f} s, {size:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
