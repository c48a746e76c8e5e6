"""The tables of the page of benchmarks: `python docs/tables.py` writes them anew, from the results
that are stored in `benchmarks/results`.

A table follows a comment with its name, and ends with an empty line.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"


def stored(name: str):
    """The results of a file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def short(number: float | None) -> str:
    """Two digits."""
    return "" if number is None else f"{float(f'{number:.2g}'):g}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gaussian_processes() -> str:
    """Seconds and nats at n = 5,000."""
    names = ("cholesky", "traceax, k = 100", "matfree", "gpytorch", "gpytorch, tuned")
    gradients = [f"{name}, gradient" for name in names[:2]]
    head = ["kernel", "Cholesky", "traceax", "matfree", "GPyTorch", "tuned"]
    head += [f"gradient: {name}" for name in ("Cholesky", "traceax")]
    rows = []
    for kernel, sizes in stored("gaussian_processes").items():
        cells = [sizes["5000"][name] for name in (*names, *gradients)]
        values = [f"{short(cell['CPU seconds'])} ({short(cell['nats'])})" for cell in cells]
        values[len(names) :] = [short(cell["CPU seconds"]) for cell in cells[len(names) :]]
        rows.append([kernel, *values])
    return table(head, rows)


def traces() -> str:
    """Times of estimates over those of their products, and of matfree."""
    figures = stored("traces")["figures"]
    peers = stored("peers")["curvlinops"]["over products"]
    estimators = {
        "hutchinson": "Hutchinson",
        "hutch++": "Hutch++",
        "xtrace": "XTrace",
        "xnystrace": "XNysTrace",
    }
    rows = []
    for label, figure, part in (
        ("value over products", "time over that of the products", "value"),
        (
            "value and gradient over products",
            "time over that of the products",
            "value and gradient",
        ),
        ("value over matfree's", "time over matfree's", "value"),
        ("value and gradient over matfree's", "time over matfree's", "value and gradient"),
        ("compilation over matfree's", "compile time over matfree's", "value and error, CPU"),
    ):
        rows.append([label, *(short(figures[figure].get(e, {}).get(part)) for e in estimators)])
    rows.append(["curvlinops: value over its products", *(short(peers.get(e)) for e in estimators)])
    return table(["", *estimators.values()], rows)


def curvature() -> str:
    """Errors in per cent, and milliseconds, for the Hessian of one network."""
    found = stored("curvature_peers")
    rows = []
    for label, name in (
        ("Hutchinson", "hutchinson"),
        ("Hutch++", "hutch++"),
        ("XTrace", "xtrace"),
        ("all layers", "layers"),
        ("density", "density"),
    ):
        row = [label]
        for peer in ("traceax", "curvlinops", "pyhessian"):
            matrix = found[peer]["hessian"]
            if cell := matrix.get(name):
                error = 100 * cell.get("rms", cell.get("integrated error"))
                time = 1000 * cell["time over products"] * 100 * matrix["seconds of a product"]
            row.append(f"{short(error)} ({short(time)})" if cell else "")
        rows.append(row)
    return table(["", "traceax", "curvlinops", "PyHessian"], rows)


def renewed(text: str) -> str:
    """The page with the tables of the stored results."""
    for make in (gaussian_processes, traces, curvature):
        mark = f"<!-- {make.__name__} -->\n\n"
        before, after = text.split(mark)
        _, _, after = after.partition("\n\n")
        text = f"{before}{mark}{make()}\n{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
