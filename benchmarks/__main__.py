"""All measurements of traces, by one command.

    python -m benchmarks                        # all of them; about five minutes on two cores
    python -m benchmarks --quick                # small sizes, for trying it out
    python -m benchmarks --only trace compile   # some of them

It prints a table, and writes `traces.json` and `traces.png` into `benchmarks/results`; into the
folder `--out` with `--quick` or `--only`, and nowhere without it. What needs a GPU is skipped where
there is none. Needs the extra `bench`.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SUITE = ("trace", "compile", "first_call", "hessian", "kernel", "exact", "memory", "errors", "gpu")


def measure(names):
    """Run the benchmarks: pytest's exit code, and what they reported."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.json"
        options = ["-q", "-s", "--benchmark-only", "--benchmark-quiet", f"--benchmark-json={raw}"]
        options += ["-W", "ignore:Not saving anything"]  # nothing but the GPU's part, without a GPU
        code = pytest.main([*(str(HERE / f"bench_{name}.py") for name in names), *options])
        entries = json.loads(raw.read_text())["benchmarks"] if raw.exists() else []
    return code, [entry["extra_info"] for entry in entries]


def machine():
    """What the figures were measured on."""
    import jax

    import traceax

    packages = ("jax", "jaxlib", "matfree")
    return {
        "system": platform.platform(),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
        "traceax": traceax.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
    }


def condensed(reports):
    """The reports as nested dictionaries: what, group, row, column."""
    found = {what: {} for what in ("figures", "targets", "seconds")}
    for each in reports:
        for what, groups in found.items():
            groups.setdefault(each["group"], {})[each["row"]] = each[what]
    return found


def show(found):
    """Print the figures, and the targets that are missed."""
    for group, rows in found["figures"].items():
        print(f"\n{group}")
        for row, figures in rows.items():
            targets = found["targets"][group][row]
            cells = []
            for column, figure in figures.items():
                target = targets.get(column)
                missed = target is not None and figure > target
                wanted = "" if target is None else f" ({'MISSES ' if missed else ''}{target:g})"
                cells.append(f"{column} {figure:.3g}{wanted}")
            print(f"  {row:20s} " + "   ".join(cells))


def draw(found):
    """A panel for each group: bars with their targets, or lines for errors over products."""
    from matplotlib.figure import Figure

    groups = found["figures"]
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(5.5 * columns, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for (group, table), axis in zip(groups.items(), axes, strict=False):
        panel = lines if "over products" in group else bars
        panel(axis, table, found["targets"][group])
        axis.set_title(group, fontsize=11)
        axis.legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.set_visible(False)
    return figure


def lines(axis, table, _):
    """Figures over columns that are numbers."""
    for row, figures in table.items():
        theirs = row.startswith("matfree")
        style = {"linestyle": "--", "marker": "x"} if theirs else {"marker": "o"}
        colour = f"C{list(table).index(row.removeprefix('matfree, '))}"
        budgets = [int(column) for column in figures]
        axis.loglog(budgets, list(figures.values()), color=colour, ms=4, label=row, **style)
    axis.set_xticks(budgets, [str(k) for k in budgets])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def bars(axis, table, targets):
    """A group of bars for each row, with a black line where a target is."""
    names = list(dict.fromkeys(column for figures in table.values() for column in figures))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [j + (i - (len(names) - 1) / 2) * width for j in range(len(table))]
        heights = [figures.get(name, 0) for figures in table.values()]
        axis.bar(places, heights, width, label=name, color=f"C{i}")
        for place, height, row in zip(places, heights, table, strict=True):
            if height:
                label = axis.annotate(f"{height:.2g}", (place, height), ha="center", va="bottom")
                label.set(size=7, bbox={"color": "white", "pad": 0.2}, zorder=3)
            if name in targets[row]:
                edges = place - width / 2, place + width / 2
                axis.hlines(targets[row][name], *edges, color="black", linewidth=1.5)
    if any(targets.values()):
        axis.plot([], [], color="black", label="target")
    axis.set_xticks(range(len(table)), list(table))
    axis.margins(y=0.25)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SUITE, default=SUITE, metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        os.environ["TRACEAX_BENCHMARKS_QUICK"] = "1"
    whole = not args.quick and tuple(args.only) == SUITE
    out = args.out or (RESULTS if whole else None)
    code, reports = measure(args.only)
    found = condensed(reports)
    show(found)
    if out is not None and reports:
        out.mkdir(parents=True, exist_ok=True)
        where = machine()
        text = json.dumps({"machine": where, "quick": args.quick, **found}, indent=1)
        (out / "traces.json").write_text(text + "\n")
        figure = draw(found)
        figure.suptitle(", ".join(f"{name} {value}" for name, value in where.items()), size=10)
        figure.savefig(out / "traces.png", dpi=90)
    return code


if __name__ == "__main__":
    sys.exit(main())
