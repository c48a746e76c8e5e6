"""The command line, in this process (`main`) and once as a program: traces and diagonals."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.io
import scipy.sparse

from traceax._cli import main

from ..helpers import environment, variant, with_spectrum

BUS = Path(__file__).parents[2] / "traceax" / "data" / "1138_bus.mtx"
EXACT = 973900.4097233
INVERSE = "--function", "inv"
SPECTRUM = np.geomspace(0.01, 4, 120)


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def check_usage(capsys, arguments):
    """That these arguments are refused, with a word on the right ones."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    assert "usage: traceax" in capsys.readouterr().err


def save_precision(folder, dtype=np.float64, spectrum=SPECTRUM, suffix="npy"):
    """A positive definite matrix in a file, and the diagonal of its inverse."""
    matrix = with_spectrum(np.random.default_rng(2), spectrum, dtype)
    matrix = (matrix + matrix.conj().T) / 2
    path = folder / f"precision.{suffix}"
    if suffix == "npz":
        scipy.sparse.save_npz(path, scipy.sparse.csr_array(matrix))
    else:
        np.save(path, matrix)
    return path, np.linalg.inv(matrix).diagonal().real


def test_the_trace_of_the_sample_matrix_as_a_program():
    command = [sys.executable, "-m", "traceax", "trace", BUS]
    options = {"capture_output": True, "text": True, "check": True}
    result = subprocess.run(command, **options, env=environment())
    rows = {line[:16].rstrip(): line[17:] for line in result.stdout.splitlines()}
    assert list(rows) == ["matrix", "exact trace", "matvecs", "seconds", "result"]
    assert (rows["exact trace"], rows["matvecs"]) == ("973900.4097233", "0")
    assert result.stderr == ""


@pytest.mark.variant
def test_a_tolerance_of_a_diagonal(capsys, tmp_path):
    path, _ = save_precision(tmp_path)
    report = run_json(capsys, "diagonal", path, *INVERSE, "--rtol", 0.3, "--exact")
    assert report["relative_error"] < 0.3
    assert (report["k"], report["rtol"]) == (None, 0.3)
    assert report["matvecs"] < 120


@pytest.mark.variant
def test_progress_on_a_terminal(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path, _ = save_precision(tmp_path)
    code, _, err = run(capsys, "diagonal", path, *INVERSE, "--rtol", 0.3)
    jax.effects_barrier()
    assert code == 0
    assert "+-" in err + capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-k", 10, "--rtol", 0.1), "give one or the other"),
        (("--max-k", 10), "--max-k bounds a tolerance"),
    ],
)
def test_a_tolerance_that_does_not_fit(capsys, options, message):
    code, out, err = run(capsys, "diagonal", BUS, *INVERSE, *options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("options", [(), ("--dtype", "float32"), ("--exact",)])
def test_what_a_file_contains_is_read(capsys, monkeypatch, options):
    """Exactly, with no products, and with nothing in the report that belongs to an estimate."""
    monkeypatch.setattr("traceax.SparseLinearOperator.mv", None)  # a product would be a TypeError
    trace = run_json(capsys, "trace", BUS, *options)
    diagonal = run_json(capsys, "diagonal", BUS, *options)
    for report, value in ((trace, "exact"), (diagonal, "sum")):
        assert report[value] == pytest.approx(EXACT, rel=1e-6 if "float32" in options else 1e-12)
        assert (report["n"], report["matvecs"], report["result"]) == (1138, 0, "successful")
        assert report["dtype"] == ("float32" if "float32" in options else "float64")
        assert not {"k", "seed", "estimate", "std_err", "rms_std_err", "rtol"} & set(report)
    assert set(diagonal["largest"]) == {"index", "exact"}


@pytest.mark.parametrize("command", ["trace", "diagonal"])
@pytest.mark.parametrize(
    "option", [("-k", 9), ("--seed", 0), ("--tag", "psd"), ("--steps", 3), ("--rtol", 0.0)]
)
def test_what_is_read_takes_no_options_of_an_estimate(capsys, monkeypatch, command, option):
    if option[0] in {"trace": ("--rtol",), "diagonal": ("--steps",)}[command]:
        check_usage(capsys, [command, BUS, *option])  # with no estimate of this command either
        return
    monkeypatch.setattr("traceax._cli.common.read_matrix", None)  # that would be a TypeError
    code, out, err = run(capsys, command, BUS, *option)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"traceax: {option[0]} {option[1]} is for estimates")
    assert "add --function" in err


def test_a_removed_command_says_what_to_type(capsys):
    code, out, err = run(capsys, "spectral-sum", BUS, "--function", "inv")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err == (
        "traceax: There is no spectral-sum any more: use `traceax trace FILE --function NAME`.\n"
    )


@pytest.mark.parametrize("suffix", ["mtx.gz", "npz", "npy"])
def test_file_formats(capsys, tmp_path, suffix):
    matrix = np.random.default_rng(0).standard_normal((12, 12))
    path = tmp_path / f"matrix.{suffix}"
    if suffix == "mtx.gz":
        rows = "\n".join(
            f"{i + 1} {j + 1} {matrix[i, j]:.17g}" for i in range(12) for j in range(12)
        )
        text = f"%%MatrixMarket matrix coordinate real general\n12 12 144\n{rows}\n"
        path.write_bytes(gzip.compress(text.encode()))
    elif suffix == "npz":
        scipy.sparse.save_npz(path, scipy.sparse.csr_array(matrix))
    else:
        np.save(path, matrix)
    report = run_json(capsys, "trace", path)
    assert report["exact"] == pytest.approx(np.trace(matrix), rel=1e-14)


def test_complex_matrix(capsys, tmp_path):
    matrix = np.random.default_rng(0).standard_normal((2, 8, 8))
    matrix = matrix[0] + 1j * matrix[1]
    np.save(tmp_path / "complex.npy", matrix)
    report = run_json(capsys, "trace", tmp_path / "complex.npy")
    assert report["exact"] == pytest.approx([np.trace(matrix).real, np.trace(matrix).imag])


def test_nan_in_the_file_is_said(capsys, tmp_path):
    matrix = np.eye(9)
    matrix[2, 3] = np.nan
    np.save(tmp_path / "nan.npy", matrix)
    code, out, err = run(capsys, "trace", tmp_path / "nan.npy", "--json")
    assert code == 1
    assert json.loads(out)["exact"] is None
    assert "NaN" in err


def bad_files(folder):
    (folder / "text.mtx").write_text("not a matrix\n")
    (folder / "notes.txt").write_text("1 2\n3 4\n")
    (folder / "broken.npz").write_bytes(b"PK\x03\x04 nothing")
    np.save(folder / "wide.npy", np.ones((3, 4)))
    np.save(folder / "vector.npy", np.ones(3))
    np.save(folder / "words.npy", np.array([["a", "b"], ["c", "d"]]))
    np.save(folder / "objects.npy", np.array([[None, None], [None, None]]), allow_pickle=True)
    return {
        "missing.mtx": "no such file",
        "text.mtx": "text.mtx",
        "notes.txt": ".txt",
        "broken.npz": "broken.npz",
        "wide.npy": "3x4",
        "vector.npy": "vector.npy",
        "words.npy": "words.npy",
        "objects.npy": "objects.npy",
    }


def test_bad_files_exit_with_2_and_one_line(capsys, tmp_path):
    for name, words in bad_files(tmp_path).items():
        code, out, err = run(capsys, "trace", tmp_path / name)
        assert (code, out) == (2, ""), name
        assert len(err.splitlines()) == 1, err
        assert err.startswith("traceax: ")
        assert words in err, err


@pytest.mark.parametrize(
    "arguments",
    [[], ["trace"], ["trace", BUS, "-k", "0"], ["trace", BUS, "-k", "1.5"], ["bogus"],
     ["trace", BUS, "--estimator", "xtrace"], ["trace", BUS, "--seed", "-1"],
     ["trace", BUS, "--dtype", "int8"], ["trace", BUS, "--top", "3"], ["diagonal"],
     ["diagonal", BUS, "--function", "sin"], ["diagonal", BUS, "--top", "0"]],
)  # fmt: skip
def test_bad_arguments_exit_with_2(capsys, arguments):
    check_usage(capsys, arguments)


def test_table_of_the_diagonal_of_the_sample_matrix(capsys):
    code, out, err = run(capsys, "diagonal", BUS, "--top", 3)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    labels = ["matrix", "entries", "sum", "smallest entry", "largest entry", "matvecs", "seconds",
              "result", "", "index (from 0)"]  # fmt: skip
    for label, line in zip(labels, lines, strict=False):
        assert line[:16].rstrip() == label
    assert lines[1].split() == ["entries", "1138"]
    assert len(lines) == len(labels) + 3
    assert lines[len(labels)].split() == ["47", "20183.36"]  # the largest entry leads the list


def test_table_of_the_diagonal_of_an_inverse(capsys):
    code, out, err = run(capsys, "diagonal", BUS, *INVERSE, "-k", 60, "--exact", "--top", 2)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    labels = ["matrix", "function", "entries", "sum", "smallest entry", "largest entry",
              "standard error", "matvecs", "seconds", "result", "relative error",
              "within 2 errors", "", "index (from 0)"]  # fmt: skip
    assert [line[:16].rstrip() for line in lines[:-2]] == labels
    assert lines[13].split()[3:] == ["estimate", "standard", "error", "exact"]
    assert "(root mean square)" in lines[6]
    assert len(lines[-1].split()) == 4


@pytest.mark.parametrize(
    ("dtype", "suffix"),
    [variant(np.float64, "npz"), (np.complex128, "npy"), variant(np.float32, "npz")],
)
def test_diagonal_of_an_inverse(capsys, tmp_path, dtype, suffix):
    """Within the error bars for a part of the products, and exactly for all of them."""
    path, truth = save_precision(tmp_path, dtype, suffix=suffix)
    out = tmp_path / "out.npy"
    options = (*INVERSE, "--exact", "--output", out)
    rounding = 1e-9 if dtype != np.float32 else 1e-3

    report = run_json(capsys, "diagonal", path, *options, "-k", 60, "--top", 4)
    values, std_errs, exact = np.load(out)
    np.testing.assert_allclose(exact, truth, rtol=rounding)
    assert (report["n"], report["matvecs"], report["function"]) == (120, 60, "inv")
    assert report["dtype"] == np.dtype(dtype).name
    errors = np.abs(values - truth)
    # Student's t: 93 % of normal errors; 85 % is three binomial deviations of 120 entries below.
    assert np.mean(errors <= 2 * std_errs) >= 0.85
    within = np.abs(values - exact) <= 2 * std_errs
    assert report["within_two_std_errs"] == pytest.approx(within.mean())
    relative = np.linalg.norm(errors) / np.linalg.norm(truth)
    assert report["relative_error"] == pytest.approx(relative, rel=1e-2)
    assert 0 < report["rms_std_err"] == pytest.approx(np.sqrt(np.mean(std_errs**2)))
    order = np.argsort(-np.abs(values))
    assert [entry["index"] for entry in report["top"]] == order[:4].tolist()
    assert report["largest"]["std_err"] == std_errs[values.argmax()]

    report = run_json(capsys, "diagonal", path, *options, "-k", 120)
    np.testing.assert_allclose(np.load(out)[0], truth, rtol=rounding)
    assert (report["matvecs"], report["relative_error"]) == (120, 0)


def test_marginal_variances_of_the_sample_matrix(capsys, tmp_path):
    out = tmp_path / "out.npy"
    run_json(capsys, "diagonal", BUS, *INVERSE, "-k", 100, "--output", out)
    values, std_errs = np.load(out)
    truth = np.linalg.inv(scipy.io.mmread(BUS, spmatrix=False).toarray()).diagonal()
    assert np.linalg.norm(values - truth) < 0.1 * np.linalg.norm(truth)
    assert np.mean(np.abs(values - truth) <= 2 * std_errs) > 0.9


def test_seed_of_a_diagonal(capsys, tmp_path):
    path, _ = save_precision(tmp_path)
    arguments = ("diagonal", path, *INVERSE, "-k", 10)
    reports = [run_json(capsys, *arguments, "--seed", seed) for seed in (1, 1, 2)]
    assert reports[0]["top"] == reports[1]["top"] != reports[2]["top"]
    assert run_json(capsys, *arguments)["seed"] == 0


def not_positive_definite():
    laplacian = np.diag([1.0, 2, 2, 1]) - np.diag(np.ones(3), 1) - np.diag(np.ones(3), -1)
    basis, _ = np.linalg.qr(np.random.default_rng(3).standard_normal((40, 40)))
    singular = (basis * np.r_[0, np.linspace(1, 2, 39)]) @ basis.T
    return {
        "indefinite": np.diag([1.0, -1, 2, 3]),
        "zero on the diagonal": np.array([[0.0, 1], [1, 0]]),
        "singular": laplacian,
        "singular to rounding": (singular + singular.T) / 2,
    }


@pytest.mark.parametrize("name", not_positive_definite())
def test_only_positive_definite_matrices_have_marginal_variances(capsys, tmp_path, name):
    np.save(tmp_path / "a.npy", not_positive_definite()[name])
    code, out, err = run(capsys, "diagonal", tmp_path / "a.npy", *INVERSE, "--json", "--exact")
    report = json.loads(out)
    assert (code, report["result"], report["sum"]) == (1, "outside_domain", None)
    assert "not positive definite" in err


def test_untrustworthy_diagonals_exit_with_1(capsys, tmp_path):
    matrix = np.eye(40)
    matrix[2, 3] = matrix[3, 2] = np.nan
    np.save(tmp_path / "a.npy", matrix)
    for options in ((), (*INVERSE, "-k", 4)):
        code, out, err = run(capsys, "diagonal", tmp_path / "a.npy", *options, "--json")
        assert code == 1
        report = json.loads(out)
        assert (report["sum"], report["result"]) == (None, "nonfinite_operator")
        assert len(report["top"]) == 5
        assert "NaN" in err


def test_asymmetric_matrices_have_no_such_inverse(capsys, tmp_path):
    np.save(tmp_path / "a.npy", np.array([[2.0, 1], [0, 2]]))
    assert run_json(capsys, "diagonal", tmp_path / "a.npy")["sum"] == 4
    code, out, err = run(capsys, "diagonal", tmp_path / "a.npy", *INVERSE)
    assert (code, out) == (2, "")
    assert "not symmetric" in err


def test_extremes_count_signs_and_the_list_magnitudes(capsys, tmp_path):
    np.save(tmp_path / "a.npy", np.diag([1.0, -7.0, 3.0, 0.5]))
    report = run_json(capsys, "diagonal", tmp_path / "a.npy")
    assert report["smallest"] == {"index": 1, "exact": -7.0}
    assert report["largest"] == {"index": 2, "exact": 3.0}
    assert [entry["index"] for entry in report["top"]] == [1, 2, 0, 3]  # 5 wanted, 4 there
    assert report["sum"] == -2.5


def test_complex_diagonal(capsys, tmp_path):
    path, out = tmp_path / "a.npy", tmp_path / "out.npy"
    exact = np.array([1 + 2j, -3j, 0.5])
    np.save(path, np.diag(exact) + np.tri(3, k=-1))
    report = run_json(capsys, "diagonal", path, "--output", out)
    np.testing.assert_array_equal(np.load(out), [exact])
    assert report["sum"] == [1.5, -1.0]
    assert report["smallest"] == {"index": 2, "exact": [0.5, 0.0]}
    assert report["largest"] == {"index": 1, "exact": [0.0, -3.0]}
    code, table, err = run(capsys, "diagonal", path)
    assert (code, err, table.count("(by magnitude)")) == (0, "", 2)


@pytest.mark.parametrize(
    ("options", "dtype", "names"),
    [
        ((), np.float64, ["exact"]),
        ((), np.complex128, ["real", "imag"]),
        variant((*INVERSE, "-k", 6), np.float64, ["estimate", "std_err"]),
        ((*INVERSE, "-k", 6), np.complex128, ["estimate", "std_err"]),
    ],
)
def test_output_as_text_is_that_of_npy(capsys, tmp_path, options, dtype, names):
    path, _ = save_precision(tmp_path, dtype)
    for suffix in ("npy", "txt", "CSV"):
        out = tmp_path / f"out.{suffix}"
        assert run(capsys, "diagonal", path, *options, "--output", out)[0] == 0
    array = np.load(tmp_path / "out.npy")
    assert array.shape == (2 if options else 1, 120)
    assert array.dtype == (np.float64 if options else dtype)
    columns = [array[0].real, array[0].imag] if names[0] == "real" else list(array)

    text, csv = tmp_path / "out.txt", tmp_path / "out.CSV"
    assert text.read_text().splitlines()[0] == "# " + " ".join(names)
    assert csv.read_text().splitlines()[0] == ",".join(names)
    np.testing.assert_array_equal(np.loadtxt(text, ndmin=2), np.transpose(columns))
    table = np.loadtxt(csv, delimiter=",", skiprows=1, ndmin=2)
    np.testing.assert_array_equal(table, np.transpose(columns))


def test_bad_output_is_said_before_computing(capsys, tmp_path, monkeypatch):
    path, _ = save_precision(tmp_path)
    (tmp_path / "folder.txt").mkdir()
    monkeypatch.setattr("traceax._cli.diagonal.read_matrix", None)  # that would be a TypeError
    cases = {"out.mat": "'.mat'", "out": ".npy, .txt, .csv", "folder.txt": "is a directory",
             "missing/a.npy": "no directory", "precision.npy/a.npy": "no directory"}  # fmt: skip
    for name, words in cases.items():
        code, out, err = run(capsys, "diagonal", path, "--output", tmp_path / name)
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert err.startswith(f"traceax: {tmp_path / name}: ")
        assert words in err
    monkeypatch.setattr("os.access", lambda path, mode: False)
    code, out, err = run(capsys, "diagonal", path, "--output", tmp_path / "out.npy")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "no permission" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("suffix", ["npy", "csv"])
def test_full_disk_is_said(capsys, tmp_path, suffix):
    np.save(tmp_path / "a.npy", np.eye(3))
    out = tmp_path / f"out.{suffix}"
    out.symlink_to("/dev/full")
    code, printed, err = run(capsys, "diagonal", tmp_path / "a.npy", "--output", out)
    assert (code, printed, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"traceax: {out}: cannot be written")


def test_small_budget_is_raised_with_a_note(capsys, tmp_path):
    """A single product: what the estimator takes at least, or no standard error."""
    path, _ = save_precision(tmp_path)
    code, out, _ = run(capsys, "diagonal", path, *INVERSE, "-k", 1, "--json")
    assert code == 0
    assert json.loads(out)["rms_std_err"] is None
