"""The command line, in this process (`main`). (As a program it runs in `test_readme.py`.)"""

import gzip
import json
import sys

import equinox as eqx
import lineax as lx
import numpy as np
import pytest
import scipy.io
import scipy.sparse

from traceax._cli import _FUNCTIONS, main, read_operator

from ..helpers import ROOT, with_spectrum

pytestmark = pytest.mark.slow(quick=True)

BUS = ROOT / "traceax" / "data" / "1138_bus.mtx"
SPECTRUM = np.linspace(0.5, 4, 40)
NUMPY_FUNCTIONS = {name: getattr(np, name) for name in ("sqrt", "exp", "log", "log1p")}
NUMPY_FUNCTIONS["inv"] = np.reciprocal


@eqx.filter_jit
def matrix_of(operator):
    return operator.as_matrix()


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def failing(capsys, *arguments):
    """The one line of an error."""
    code, out, err = run(capsys, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith("traceax: ")
    return err


def save(folder, spectrum=SPECTRUM, dtype=np.float64):
    """A matrix with this spectrum, in a file."""
    matrix = with_spectrum(np.random.default_rng(0), np.asarray(spectrum), dtype)
    path = folder / "matrix.npy"
    np.save(path, (matrix + matrix.conj().T) / 2)
    return path


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int64", "complex128"])
def test_file_formats(tmp_path, dtype):
    """Sparse and dense, with the dtype of the file, and a tag where it is symmetric."""
    rng = np.random.default_rng(0)
    dense = rng.integers(-4, 5, (7, 7)) * (rng.random((7, 7)) < 0.4)
    if dtype == "complex128":
        dense = dense + 1j * np.triu(dense)
    for matrix in (dense.astype(dtype), (dense + dense.T).astype(dtype)):
        scipy.io.mmwrite(tmp_path / "a.mtx", scipy.sparse.coo_array(matrix))
        scipy.io.mmwrite(tmp_path / "dense.mtx", matrix)
        packed = gzip.compress((tmp_path / "a.mtx").read_bytes())
        (tmp_path / "a.mtx.gz").write_bytes(packed)
        scipy.sparse.save_npz(tmp_path / "A.NPZ", scipy.sparse.dia_matrix(matrix))
        (tmp_path / "A.NPZ.npz").rename(tmp_path / "A.NPZ")
        np.save(tmp_path / "a.npy", matrix)
        for name in ("a.mtx", "a.mtx.gz", "dense.mtx", "A.NPZ", "a.npy"):
            operator = read_operator(str(tmp_path / name))
            np.testing.assert_array_equal(matrix_of(operator), matrix)
            is_real = dtype != "complex128"
            assert lx.is_symmetric(operator) == (is_real and (matrix == matrix.T).all())
            assert isinstance(operator, lx.MatrixLinearOperator) is (name in ("dense.mtx", "a.npy"))
            single = dtype == "float32" and "mtx" not in name  # text has no float32
            expected = "float32" if single else dtype.replace("int64", "float64")
            expected = "float64" if dtype == "float32" and not single else expected
            assert operator.in_structure().dtype == expected


def test_a_pattern_with_duplicates(tmp_path):
    path = tmp_path / "a.mtx"
    path.write_text("%%MatrixMarket matrix coordinate pattern symmetric\n3 3 3\n1 1\n3 1\n1 1\n")
    operator = read_operator(str(path), "float32")
    np.testing.assert_array_equal(matrix_of(operator), [[2, 0, 1], [0, 0, 0], [1, 0, 0]])
    assert operator.in_structure().dtype == "float32"


def test_bad_files_exit_with_2_and_one_line(capsys, tmp_path):
    (tmp_path / "text.mtx").write_text("not a matrix\n")
    np.savez(tmp_path / "archive.npz", a=np.eye(2))
    np.save(tmp_path / "wide.npy", np.ones((3, 4)))
    np.save(tmp_path / "objects.npy", np.array([[None]]), allow_pickle=True)
    np.save(tmp_path / "complex.npy", np.eye(2) + 0j)
    cases = {
        "missing.mtx": "cannot be read",
        "text.mtx": "Give a Matrix Market file",
        "archive.npz": "cannot be read",
        "wide.npy": "(3, 4). Give a square matrix",
        "objects.npy": "allow_pickle",
        "complex.npy": "Use --dtype complex64",
    }
    for name, words in cases.items():
        assert words in failing(capsys, "trace", tmp_path / name, "--dtype", "float32"), name


# --- what is read --------------------------------------------------------------------------------


def test_the_diagonal_of_the_sample_matrix(capsys):
    """Exactly, without products: the entries that are largest in magnitude, and all as JSON."""
    code, printed, err = run(capsys, "diagonal", BUS, "--top", 3)
    assert (code, err) == (0, "")
    lines = printed.splitlines()
    assert lines[-4].split() == ["index", "value", "std_err", "low", "high"]
    assert lines[-3].split() == ["47", "20183.36", "0", "20183.36", "20183.36"]
    report = run_json(capsys, "diagonal", BUS)
    assert sum(report["value"]) == pytest.approx(973900.4097233, rel=1e-12)


# --- estimates -----------------------------------------------------------------------------------


def test_traces_of_functions(capsys, tmp_path):
    """Exactly for n products; for fewer with both errors, beside the exact value."""
    path = save(tmp_path)
    for name, function in NUMPY_FUNCTIONS.items():
        np.testing.assert_allclose(_FUNCTIONS[name](SPECTRUM), function(SPECTRUM), rtol=1e-14)
    report = run_json(capsys, "trace", path, "--function", "inv", "-k", 40)
    assert report["value"] == pytest.approx(np.sum(1 / SPECTRUM), rel=1e-12)
    arguments = "trace", path, "--function", "log", "-k", 20, "--psd"
    report = run_json(capsys, *arguments, "--exact")
    low, high = report["interval"]
    assert low < report["exact"] < high
    assert report["exact"] == pytest.approx(np.log(SPECTRUM).sum(), rel=1e-12)
    assert report["num_matvecs"] <= 20
    values = [run_json(capsys, *arguments, "--seed", seed)["value"] for seed in (0, 1)]
    assert report["value"] == values[0] != values[1]


def test_functions_to_a_tolerance(capsys, tmp_path):
    path = save(tmp_path)
    for command in ("trace", "diagonal"):
        arguments = command, path, "--function", "log", "--rtol", 0.2, "--psd", "--exact"
        report = run_json(capsys, *arguments)
        error = np.linalg.norm(np.subtract(report["value"], report["exact"]))
        assert error <= 0.2 * np.linalg.norm(report["exact"])
        assert report["result"] == "successful"


def test_the_diagonal_of_an_inverse(capsys, tmp_path):
    path = save(tmp_path)
    truth = np.linalg.inv(np.load(path)).diagonal()
    report = run_json(capsys, "diagonal", path, "--function", "inv", "-k", 20, "--exact")
    np.testing.assert_allclose(report["exact"], truth, rtol=1e-9)
    inside = (np.array(report["low"]) <= truth) & (truth <= report["high"])
    assert inside.mean() >= 0.8
    report = run_json(capsys, "diagonal", path, "--function", "exp", "-k", 40)
    assert sum(report["value"]) == pytest.approx(np.exp(SPECTRUM).sum(), rel=1e-12)


def test_shifted_log_determinants(capsys, tmp_path):
    """A + s I, also of complex matrices."""
    spectrum = np.where(np.arange(40) < 6, SPECTRUM, 0)
    path, truth = save(tmp_path, spectrum, np.complex128), np.log(spectrum + 0.3).sum()
    arguments = ("logdet", path, "--psd", "--shift", 0.3, "--preconditioner", "nystrom")
    report = run_json(capsys, *arguments, "-k", 20)
    assert report["value"] == pytest.approx(truth, rel=1e-8)  # rank 6: nothing is left out
    assert report["dtype"] == "complex128"


def test_log_determinants_of_many_shifts(capsys, tmp_path):
    """From the same products, with both errors, and a picture of the curve."""
    path, shifts = save(tmp_path), [-0.25, 0.1, 2.0]
    picture = tmp_path / "a.svg"
    arguments = ("logdet", path, "--shifts=2,0.1,-0.25", "-k", 32, "--plot", picture, "--exact")
    report = run_json(capsys, *arguments)
    truth = [np.log(SPECTRUM + s).sum() for s in shifts]
    assert report["shift"] == shifts
    assert report["exact"] == pytest.approx(truth, rel=1e-10)
    assert (np.array(report["low"]) <= truth).all()
    assert (truth <= np.array(report["high"])).all()
    assert report["num_matvecs"] <= 32
    assert b"<svg" in picture.read_bytes()


# --- what cannot be trusted, and what cannot be done ---------------------------------------------


@pytest.mark.parametrize("command", ["logdet", "trace --function log", "trace --function inv"])
def test_not_positive_definite(capsys, tmp_path, command):
    name, *options = command.split()
    arguments = (name, save(tmp_path, SPECTRUM - 1), *options, "-k", 10)
    code, out, err = run(capsys, *arguments)
    assert (code, out.splitlines()[-1]) == (1, "result           outside_domain")
    assert "not positive definite" in err


def test_what_the_exact_value_shows_is_an_error(capsys):
    """183 of the 1138 eigenvalues are negative then, and 20 products may not have met one."""
    options = "--shift", -5, "-k", 20, "--preconditioner", "none", "--exact"
    code, out, err = run(capsys, "logdet", BUS, *options)
    assert code == 1
    assert "not positive definite" in err
    assert "nan" in out


def test_nan_in_the_file_is_said(capsys, tmp_path):
    path = save(tmp_path)
    matrix = np.load(path)
    matrix[2, 3] = matrix[3, 2] = np.nan
    np.save(path, matrix)
    for command in ("trace", "density", "diagonal"):
        plot = ("--plot", tmp_path / "a.png") if command == "density" else ()
        code, out, err = run(capsys, command, path, "-k", 30, *plot)
        assert code == 1
        assert "result           nonfinite_operator" in out
        assert "NaN" in err
    assert not (tmp_path / "a.png").exists()


def test_functions_need_symmetry(capsys, tmp_path):
    """And complex matrices a tag."""
    path = save(tmp_path, dtype=np.complex128)
    matrix = np.load(path).real
    matrix[1, 2] += 0.25
    np.save(tmp_path / "a.npy", matrix)
    commands = (["logdet"], ["density"], ["trace", "--function", "exp"])
    for command, *options in commands:
        assert "--psd" in failing(capsys, command, path, *options)
        assert "not symmetric" in failing(capsys, command, tmp_path / "a.npy", *options)
    run_json(capsys, "trace", tmp_path / "a.npy")


def test_bad_arguments_exit_with_2(capsys, monkeypatch, tmp_path):
    cases = (
        [],
        ["trace"],
        ["bogus"],
        ["trace", BUS, "-k", "9", "--rtol", "0.1"],
        ["trace", BUS, "--function", "cos"],
        ["logdet", BUS, "--shifts", "1,x"],
        ["density", BUS, "--range", "1"],
    )
    for arguments in cases:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        assert stop.value.code == 2
        assert "usage: traceax" in capsys.readouterr().err
    assert "Add --shifts" in failing(capsys, "logdet", BUS, "--plot", tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib" in failing(capsys, "density", BUS, "--plot", tmp_path / "a.png")


# --- densities -----------------------------------------------------------------------------------


def broadened(grid, width, spectrum=SPECTRUM):
    gaussians = np.exp(-((np.asarray(grid)[:, None] - spectrum) ** 2) / (2 * width**2))
    return gaussians.mean(axis=1) / (width * np.sqrt(2 * np.pi))


def test_a_density(capsys, tmp_path):
    """The grid spans the spectrum; the exact density; a picture."""
    picture = tmp_path / "a.png"
    arguments = "density", save(tmp_path), "-k", 30, "--exact", "--plot", picture
    report = run_json(capsys, *arguments)
    grid = np.array(report["grid"])
    assert (report["num_matvecs"], len(grid)) == (30, 200)
    width = (grid[-1] - grid[0]) / 26  # three on each side of an interval of twenty
    assert grid[0] < SPECTRUM[0] < SPECTRUM[-1] < grid[-1]
    assert 26 * width < 1.4 * (SPECTRUM[-1] - SPECTRUM[0])
    np.testing.assert_allclose(report["exact"], broadened(grid, width), rtol=1e-9, atol=1e-12)
    assert np.trapezoid(report["value"], grid) == pytest.approx(1, abs=0.01)
    low, exact, high = (np.array(report[name]) for name in ("low", "exact", "high"))
    assert np.mean((low <= exact) & (exact <= high)) > 0.9
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_density_on_a_given_grid(capsys, tmp_path):
    arguments = ("--range", -1, 5, "--width", 0.2, "--points", 60)
    path = save(tmp_path)
    report = run_json(capsys, "density", path, "-k", 40, *arguments)
    np.testing.assert_allclose(report["grid"], np.linspace(-1, 5, 60), atol=1e-15)
    np.testing.assert_allclose(report["value"], broadened(report["grid"], 0.2), rtol=1e-9)
    assert report["num_matvecs"] == 40  # no first products
    code, out, _ = run(capsys, "density", path, "-k", 40, *arguments)
    assert (code, len(out.splitlines())) == (0, 6 + 2 + 25)


def test_the_density_of_a_multiple_of_the_identity(capsys, tmp_path):
    """No extent: the width is relative to the eigenvalue."""
    path = save(tmp_path, np.full(40, 3.0))
    report = run_json(capsys, "density", path, "-k", 30)
    grid = np.array(report["grid"])
    width = (grid[-1] - grid[0]) / 6
    np.testing.assert_allclose(report["value"], broadened(grid, width, np.array([3.0])), 1e-4)
    assert 0 < width < 0.1
