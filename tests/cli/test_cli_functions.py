"""The commands for functions of matrices: logdet, trace --function, density."""

import json
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as ss

from ..helpers import environment, variant, with_spectrum
from .test_cli import BUS, check_usage, run, run_json

LOG_DETERMINANT, TRACE_OF_INVERSE = 4240.821184502369, 488.2123076681323  # of the sample matrix
SPECTRUM = np.linspace(0.5, 4, 40)
FUNCTIONS = {
    "inv": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
}


def save(folder, spectrum=SPECTRUM, dtype=np.float64):
    path = folder / "matrix.npy"
    np.save(path, with_spectrum(np.random.default_rng(0), np.asarray(spectrum), dtype))
    return path


def failing(capsys, *arguments):
    """The one line of an error."""
    code, out, err = run(capsys, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith("traceax: ")
    return err


def check_interval(report, truth):
    """What it is made of, and that the truth lies in it."""
    half = 2 * report["std_err"] + report["quadrature_error"]
    middle = report["estimate"]
    assert report["interval"] == pytest.approx([middle - half, middle + half])
    assert report["error_in_half_intervals"] == pytest.approx(abs(middle - truth) / half, rel=1e-6)
    assert abs(middle - truth) <= half


# --- the sample matrix ---------------------------------------------------------------------------


def test_exact_values_of_the_sample_matrix(capsys):
    for arguments, truth, rounding in (  # from the entries, by a Cholesky factorisation
        (("logdet",), LOG_DETERMINANT, 1e-10),
        (("trace", "--function", "inv"), TRACE_OF_INVERSE, 1e-9 * TRACE_OF_INVERSE),
    ):
        command, *options = arguments
        report = run_json(capsys, command, BUS, *options, "-k", 2000)
        assert report["estimate"] == pytest.approx(truth, rel=1e-9)
        assert report["std_err"] == 0
        assert 0 < report["quadrature_error"] < rounding
        assert (report["matvecs"], report["result"]) == (0, "successful")


@pytest.mark.parametrize("preconditioner", [variant("auto"), "none"])
def test_log_determinant_of_the_sample_matrix(capsys, preconditioner):
    """Ill-conditioned (9e6), no shift written down: the interval is wide, and holds the truth, and
    the exit code says that the recurrences have not converged.
    """
    arguments = ("-k", 400, "--preconditioner", preconditioner, "--exact", "--json")
    code, out, err = run(capsys, "logdet", BUS, *arguments)
    report = json.loads(out)
    assert (code, report["result"]) == (1, "not_converged")
    assert "quadrature error" in err
    assert report["exact"] == pytest.approx(LOG_DETERMINANT, rel=1e-12)
    check_interval(report, LOG_DETERMINANT)
    assert report["interval"][1] - report["interval"][0] < 0.35 * LOG_DETERMINANT
    assert 390 <= report["matvecs"] <= 400
    assert report["preconditioner"] == preconditioner


@pytest.mark.variant
def test_trace_of_the_inverse_of_the_sample_matrix(capsys):
    """Exact from n/6 products on, as the entries are known; with steps, a quadrature alone."""
    arguments = "trace", BUS, "--function", "inv", "--exact"
    report = run_json(capsys, *arguments, "-k", 200)
    assert report["estimate"] == pytest.approx(TRACE_OF_INVERSE, rel=1e-9)
    assert (report["matvecs"], report["std_err"]) == (0, 0)
    code, out, err = run(capsys, *arguments, "-k", 400, "--steps", 66, "--json")
    report = json.loads(out)
    assert (code, report["result"]) == (1, "not_converged")
    assert "quadrature error" in err
    assert report["exact"] == pytest.approx(TRACE_OF_INVERSE, rel=1e-9)
    check_interval(report, TRACE_OF_INVERSE)
    # Hopeless with this budget, and said so: the error exceeds the value.
    assert report["quadrature_error"] > report["estimate"]


# --- one number ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_spectral_sums(capsys, tmp_path, function):
    report = run_json(capsys, "trace", save(tmp_path), "--function", function, "-k", 40)
    assert report["estimate"] == pytest.approx(FUNCTIONS[function](SPECTRUM).sum(), rel=1e-12)
    matvecs = 0 if function == "inv" else 40  # that of the inverse is factorised
    assert (report["matvecs"], report["function"]) == (matvecs, function)


@pytest.mark.parametrize(
    "command", ["logdet", "trace --function exp", "density", "diagonal --function inv"]
)
def test_exact_values_of_large_matrices_are_refused(capsys, tmp_path, command):
    """Before anything is computed, rather than after a dense matrix did not fit into memory."""
    path, n = tmp_path / "large.npz", 20_000
    ss.save_npz(
        path, ss.diags_array([[-1.0] * (n - 1), [3.0] * n, [-1.0] * (n - 1)], offsets=[-1, 0, 1])
    )
    name, *options = command.split()
    code, out, err = run(capsys, name, path, *options, "-k", 10, "--exact")
    assert (code, out) == (2, "")
    assert "20000 rows (3 GiB) for at most 16384" in " ".join(err.split())


@pytest.mark.variant
def test_diagonal_of_a_function(capsys, tmp_path):
    """From products, with both errors, beside the exact one."""
    path, out = save(tmp_path), tmp_path / "diagonal.csv"
    arguments = "diagonal", path, "--function", "exp", "-k", 36, "--exact"
    report = run_json(capsys, *arguments, "--output", out)
    assert report["function"] == "exp"
    assert report["matvecs"] <= 36
    assert report["within_two_std_errs"] >= 0.7
    table = np.genfromtxt(out, delimiter=",", names=True)
    assert table.dtype.names == ("estimate", "std_err", "quadrature_error", "exact")
    assert table["exact"].sum() == pytest.approx(np.exp(SPECTRUM).sum(), rel=1e-12)
    error = np.linalg.norm(table["estimate"] - table["exact"])
    assert report["relative_error"] == pytest.approx(error / np.linalg.norm(table["exact"]))
    code, _, err = run(capsys, "diagonal", path, "--function", "exp", "--rtol", 0.1)
    assert code == 2
    assert "give a budget" in " ".join(err.split())


@pytest.mark.parametrize("k", [10, 40])
@pytest.mark.parametrize("sign", [1, -1])
def test_trace_of_an_inverse_needs_a_positive_definite_matrix(capsys, tmp_path, k, sign):
    """A pole inside of the spectrum is missed by quadrature, and finite at every Ritz value."""
    path = save(tmp_path, sign * (SPECTRUM - 1))
    code, out, err = run(capsys, "trace", path, "--function", "inv", "-k", k, "--json")
    assert (code, json.loads(out)["result"]) == (1, "outside_domain")
    assert "not positive definite" in " ".join(err.split())


def test_number_of_steps(capsys, tmp_path):
    """Few steps for many probes, or the other way round."""
    path, truth = save(tmp_path), np.log(SPECTRUM).sum()
    arguments = ("trace", path, "--function", "log", "-k", 36, "--exact", "--steps")
    few, many = (run_json(capsys, *arguments, steps) for steps in (3, 18))
    for report in (few, many):
        check_interval(report, truth)
        assert report["matvecs"] == 36
    assert few["quadrature_error"] > 1e3 * many["quadrature_error"]
    assert few["std_err"] < many["std_err"]


def test_table_of_a_spectral_sum(capsys, tmp_path):
    path = save(tmp_path)
    arguments = ("trace", path, "--function", "sqrt", "-k", 20, "--tag", "psd", "--exact")
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    labels = ["matrix", "function", "estimate", "standard error", "quadrature error", "interval",
              "matvecs", "seconds", "result", "exact value", "error"]  # fmt: skip
    rows = {line[:16].rstrip(): line[17:] for line in out.splitlines()}
    assert list(rows) == labels
    assert float(rows["exact value"]) == pytest.approx(np.sqrt(SPECTRUM).sum(), rel=1e-12)
    low, high = json.loads(rows["interval"].split(" (")[0])
    assert low < float(rows["estimate"]) < high
    assert rows["result"] == "successful"


@pytest.mark.variant
@pytest.mark.parametrize(
    ("dtype", "tag"), [variant(np.float64, ()), (np.complex128, ("--tag", "psd"))]
)
def test_shifted_log_determinants(capsys, tmp_path, dtype, tag):
    """A + s I, also of complex matrices, whose files show that they are Hermitian."""
    spectrum = np.where(np.arange(40) < 6, SPECTRUM, 0)
    path, truth = save(tmp_path, spectrum, dtype), np.log(spectrum + 0.3).sum()
    arguments = ("logdet", path, "--shift", 0.3, "--preconditioner", "nystrom", *tag)
    report = run_json(capsys, *arguments, "-k", 20)
    assert report["estimate"] == pytest.approx(truth, rel=1e-8)  # rank 6: nothing is left out
    assert report["shift"] == 0.3
    code, out, _ = run(capsys, *arguments, "-k", 40)
    assert code == 0
    rows = {line[:16].rstrip(): line[17:] for line in out.splitlines()}
    assert rows["shift"] == "0.3"
    assert float(rows["estimate"]) == pytest.approx(truth, rel=1e-9)


@pytest.mark.variant
def test_seed_and_dtype(capsys, tmp_path):
    arguments = ("trace", save(tmp_path), "--function", "log", "-k", 10)
    reports = [run_json(capsys, *arguments, "--seed", seed) for seed in (1, 1, 2)]
    assert reports[0]["estimate"] == reports[1]["estimate"] != reports[2]["estimate"]
    single = run_json(capsys, *arguments, "--seed", 1, "--dtype", "float32")
    assert single["dtype"] == "float32"
    # The probes are others in single precision: within both errors.
    spread = np.hypot(single["std_err"], reports[0]["std_err"])
    gap = abs(single["estimate"] - reports[0]["estimate"])
    assert 0 < gap < 3 * spread + reports[0]["quadrature_error"]


@pytest.mark.variant
def test_log_determinants_of_many_shifts(capsys, tmp_path):
    """From the same products, with both errors, a file and a picture of the curve."""
    path, shifts = save(tmp_path), [2.0, 0.1, -0.25]
    picture, columns = tmp_path / "a.svg", tmp_path / "a.csv"
    arguments = ("logdet", path, "--shifts=2,0.1,-0.25", "-k", 32, "--plot", picture)
    report = run_json(capsys, *arguments, "--output", columns, "--exact")
    truth = [np.log(SPECTRUM + s).sum() for s in shifts]
    assert report["shift"] == shifts
    assert report["exact"] == pytest.approx(truth, rel=1e-10)
    for i, exact in enumerate(truth):
        half = 2 * report["std_err"][i] + report["quadrature_error"][i]
        assert abs(report["estimate"][i] - exact) <= half < 10
    assert report["matvecs"] <= 32
    table = np.loadtxt(columns, delimiter=",", skiprows=1)
    np.testing.assert_array_equal(table[:, 0], shifts)
    np.testing.assert_array_equal(table[:, 4], report["exact"])
    assert b"<svg" in picture.read_bytes()
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["shift", "estimate", "standard", "error", "quadrature", "error"] in rows
    assert [row[0] for row in rows if row and row[0] in ("2", "0.1", "-0.25")] == [
        "2",
        "0.1",
        "-0.25",
    ]


def test_shifts_that_leave_the_matrix_indefinite_are_an_error(capsys, tmp_path):
    code, out, err = run(capsys, "logdet", save(tmp_path), "--shifts=1,-1", "-k", 40)
    assert code == 1
    assert "outside_domain" in out
    assert "not positive definite" in " ".join(err.split())


# --- what cannot be done -------------------------------------------------------------------------


COMMANDS = {"logdet": [], "trace": ["--function", "log"], "density": []}


@pytest.mark.parametrize("command", COMMANDS)
def test_matrices_must_be_symmetric(capsys, tmp_path, command):
    path = save(tmp_path)
    matrix = np.load(path)
    matrix[1, 2] += 0.25
    np.save(path, matrix)
    err = failing(capsys, command, path, *COMMANDS[command])
    assert f"{path}: the matrix is not symmetric" in err
    assert "differ by up to 0.25)" in err


@pytest.mark.parametrize(("command", "k"), [("logdet", 10), ("logdet", 40), ("trace", 10)])
def test_not_positive_definite(capsys, tmp_path, command, k):
    path = save(tmp_path, SPECTRUM - 1)
    code, out, err = run(capsys, command, path, *COMMANDS[command], "-k", k, "--json")
    assert code == 1
    report = json.loads(out)
    assert (report["estimate"], report["result"]) == (None, "outside_domain")
    assert "not positive definite" in " ".join(err.split())


@pytest.mark.parametrize("command", ["logdet", "trace", variant("density")])
def test_nan_in_the_file_is_said(capsys, tmp_path, command):
    matrix = np.eye(9)
    matrix[2, 3] = matrix[3, 2] = np.nan
    np.save(tmp_path / "nan.npy", matrix)
    plot = ("--plot", tmp_path / "a.png") if command == "density" else ()
    arguments = (command, tmp_path / "nan.npy", *COMMANDS[command], *plot, "-k", 4)
    code, out, err = run(capsys, *arguments)
    assert code == 1
    assert "\nresult           nonfinite_operator" in out
    assert "NaN" in err
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("k", [20, variant(200)])
def test_what_the_exact_value_shows_is_an_error(capsys, k):
    """183 of the 1138 eigenvalues are negative then, and 200 products may not have met one."""
    arguments = ("logdet", BUS, "--shift", -5, "-k", k, "--exact")
    code, out, err = run(capsys, *arguments)
    assert code == 1
    assert "not positive definite" in err
    assert "nan" in out


def test_indefinite_complex_matrices_have_no_tag(capsys, tmp_path):
    path = save(tmp_path, dtype=np.complex128)
    for command in ("trace", "density"):
        assert "--tag psd" in failing(capsys, command, path, *COMMANDS[command])
    arguments = ("trace", path, "--function", "log", "--tag", "psd", "-k", 40)
    truth = np.log(SPECTRUM).sum()
    assert run_json(capsys, *arguments)["estimate"] == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize(
    "arguments",
    [["trace", BUS, "--function", "cos"],
     ["trace", BUS, "--function", "log", "--steps", "0"],
     ["logdet", BUS, "--shift", "inf"], ["logdet", BUS, "--tag", "nsd"],
     ["logdet", BUS, "--shifts", "1,x"],
     ["logdet", BUS, "--preconditioner", "best"], ["logdet", BUS, "--estimator", "auto"],
     ["density", BUS, "--range", "1"], ["density", BUS, "--points", "0"]],
)  # fmt: skip
def test_bad_arguments_exit_with_2(capsys, arguments):
    check_usage(capsys, arguments)


def test_bad_choices_are_said_before_computing(capsys, tmp_path, monkeypatch):
    path = save(tmp_path)
    steps = ("--function", "log", "-k", 9, "--steps", 10)
    assert "num_steps" in failing(capsys, "trace", path, *steps)
    monkeypatch.setattr("traceax._cli.density.read_hermitian", None)  # that would be a TypeError
    cases = {
        "smaller one first": ("--range", 2, 1),
        "must be positive": ("--width", 0),
        "at least 2": ("--points", 1),
        "'.gif'; use one of .png": ("--plot", tmp_path / "a.gif"),
        "'.mat'; use one of .npy": ("--output", tmp_path / "a.mat"),
        "no directory": ("--plot", tmp_path / "missing" / "a.png"),
    }
    for words, arguments in cases.items():
        assert words in failing(capsys, "density", path, *arguments)
    logdet = {
        "exclude each other": ("--shifts", "1,2", "--shift", 1),
        "for a curve": ("--output", tmp_path / "a.csv"),
        "'.gif'; use one of .png": ("--shifts", "1,2", "--plot", tmp_path / "a.gif"),
        "leave `preconditioner` out": ("--shifts", "1,2", "--preconditioner", "nystrom"),
    }
    for words, arguments in logdet.items():
        assert words in failing(capsys, "logdet", path, *arguments)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    err = failing(capsys, "density", path, "--plot", tmp_path / "a.png")
    assert "pip install matplotlib" in err


# --- densities -----------------------------------------------------------------------------------


def broadened(grid, width, spectrum=SPECTRUM):
    gaussians = np.exp(-((np.asarray(grid)[:, None] - spectrum) ** 2) / (2 * width**2))
    return gaussians.mean(axis=1) / (width * np.sqrt(2 * np.pi))


def test_density(capsys, tmp_path):
    """The grid spans the spectrum; the exact density; the file has what JSON has."""
    path, out = save(tmp_path), tmp_path / "out.csv"
    report = run_json(capsys, "density", path, "-k", 30, "--exact", "--output", out)
    grid, width = np.array(report["grid"]), report["width"]
    assert (report["n"], report["matvecs"], len(grid)) == (40, 30, 200)
    np.testing.assert_allclose(np.diff(grid), grid[1] - grid[0])
    assert grid[0] < SPECTRUM[0] < SPECTRUM[-1] < grid[-1]
    assert grid[-1] - grid[0] < 2 * (SPECTRUM[-1] - SPECTRUM[0])
    np.testing.assert_allclose(report["exact"], broadened(grid, width), rtol=1e-9)
    assert np.trapezoid(report["density"], grid) == pytest.approx(1, abs=0.01)
    errors = np.abs(np.array(report["density"]) - report["exact"])
    allowed = 2 * np.array(report["std_err"]) + report["quadrature_error"]
    assert np.mean(errors <= allowed) > 0.9
    names = out.read_text().splitlines()[0].split(",")
    assert names == ["grid", "density", "std_err", "quadrature_error", "exact"]
    columns = np.loadtxt(out, delimiter=",", skiprows=1).T
    np.testing.assert_allclose(columns, [report[name] for name in names], rtol=1e-15)


def test_density_on_a_given_grid(capsys, tmp_path):
    out = tmp_path / "out.npy"
    arguments = ("--range", -1, 5, "--width", 0.2, "--points", 30, "--output", out)
    report = run_json(capsys, "density", save(tmp_path), "-k", 40, *arguments)
    np.testing.assert_allclose(report["grid"], np.linspace(-1, 5, 30), atol=1e-15)
    np.testing.assert_allclose(report["density"], broadened(report["grid"], 0.2), rtol=1e-9)
    assert (report["matvecs"], report["width"]) == (40, 0.2)  # no first probe
    assert np.load(out).shape == (4, 30)


@pytest.mark.variant
def test_table_of_a_density(capsys, tmp_path):
    code, out, err = run(capsys, "density", save(tmp_path), "-k", 40, "--points", 60)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    labels = [line[:16].rstrip() for line in lines[:8]]
    assert labels == ["matrix", "width", "grid", "matvecs", "seconds", "result", "", "grid"]
    rows = np.array([line.split() for line in lines[8:-1]], float)
    assert rows.shape == (25, 4)
    np.testing.assert_allclose(rows[:, 1], broadened(rows[:, 0], float(lines[1].split()[1])), 0.05)
    assert lines[-1].split()[0] == "(35"


@pytest.mark.variant
def test_density_of_a_multiple_of_the_identity(capsys, tmp_path):
    """No extent: the width is relative to the eigenvalue."""
    np.save(tmp_path / "a.npy", 3 * np.eye(9))
    report = run_json(capsys, "density", tmp_path / "a.npy", "-k", 5)
    grid, density = np.array(report["grid"]), np.array(report["density"])
    np.testing.assert_allclose(density, broadened(grid, report["width"], np.array([3.0])), 1e-9)
    assert 0 < report["width"] < 0.1
    assert grid[0] < 3 < grid[-1]


def test_pictures(capsys, tmp_path):
    path = save(tmp_path)
    for suffix, start in {"png": b"\x89PNG", "PDF": b"%PDF", "svg": b"<?xml"}.items():
        out = tmp_path / f"a.{suffix}"
        assert run(capsys, "density", path, "-k", 40, "--plot", out)[::2] == (0, "")
        assert out.read_bytes().startswith(start)


@pytest.mark.variant
def test_matplotlib_is_imported_for_plots_only(tmp_path):
    code = (
        "import sys\nfrom traceax._cli import main\n"
        "assert main(['density', sys.argv[1], '-k', '40', '--json']) == 0\n"
        "assert not any(name.split('.')[0] == 'matplotlib' for name in sys.modules)"
    )
    command = [sys.executable, "-c", code, save(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=BUS.parents[2], env=environment())
