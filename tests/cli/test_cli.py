"""The command line, in this process (`main`) and once as a program."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.sparse

from traceax._cli import main

BUS = Path(__file__).parents[2] / "traceax" / "data" / "1138_bus.mtx"
EXACT = 973900.4097233


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


def test_the_sample_matrix_as_the_readme_runs_it():
    command = [sys.executable, "-m", "traceax", "trace", BUS, "-k", "200", "--exact"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for row in ("estimate", "standard error", "95 % interval", "matvecs", "seconds", "exact trace"):
        assert any(line.startswith(row) for line in result.stdout.splitlines()), row
    assert "973900.4097233" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["trace", "logdet"])
def test_a_tolerance(capsys, tmp_path, command):
    """It takes what it needs; what cannot be reached is said; progress is for terminals only."""
    path, matrix = tmp_path / "matrix.npy", np.diag(np.linspace(1.0, 2.0, 300))
    matrix[0, 1] = matrix[1, 0] = 0.1
    np.save(path, matrix)
    truth = np.trace(matrix) if command == "trace" else np.linalg.slogdet(matrix)[1]
    named = ("--estimator", "xtrace") if command == "trace" else ()
    report = run_json(capsys, command, path, *named, "--rtol", 0.2, "--max-k", 64, "--exact")
    assert report["exact"] == pytest.approx(truth)
    assert abs(report["estimate"] - truth) < 0.2 * truth
    assert report["matvecs"] <= 64
    assert (report["k"], report["rtol"], report["atol"], report["max_k"]) == (None, 0.2, None, 64)
    code, out, err = run(capsys, command, path, *named, "--atol", 1e-9, "--max-k", 64, "--json")
    assert (code, json.loads(out)["result"]) == (1, "not_converged")
    assert len(err.splitlines()) == 1
    assert err.startswith("traceax: The budget was spent before the tolerance was reached.")


def test_a_tolerance_of_a_diagonal(capsys, tmp_path):
    path, matrix = tmp_path / "matrix.npy", np.diag(np.linspace(1.0, 2.0, 120))
    matrix[0, 1] = matrix[1, 0] = 0.1
    np.save(path, matrix)
    options = "--rtol", 0.1, "--exact", "--estimator", "hutchinson"
    report = run_json(capsys, "diagonal", path, *options)
    assert report["relative_error"] < 0.1
    assert (report["k"], report["rtol"]) == (None, 0.1)
    assert report["matvecs"] == 16


def test_progress_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run(capsys, "trace", BUS, "--rtol", 0.5, "--estimator", "xtrace")
    jax.effects_barrier()
    assert code == 0
    assert "+-" in err + capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-k", 10, "--rtol", 0.1), "give one or the other"),
        (("--max-k", 10), "--max-k bounds a tolerance"),
        (("--rtol", 0.1, "--estimator", "exact"), "cannot work to a tolerance"),
    ],
)
def test_a_tolerance_that_does_not_fit(capsys, options, message):
    code, out, err = run(capsys, "trace", BUS, *options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++", "xtrace"])
def test_estimates_of_the_sample_matrix(capsys, estimator):
    report = run_json(capsys, "trace", BUS, "-k", 120, "--exact", "--estimator", estimator)
    assert report["exact"] == pytest.approx(EXACT, abs=1e-6)
    assert abs(report["estimate"] - EXACT) < 5 * report["std_err"]
    assert report["error_in_std_errs"] == pytest.approx(
        abs(report["estimate"] - report["exact"]) / report["std_err"]
    )
    low, high = report["interval"]
    # Student's quantile is a little above the normal one; samples with heavy tails need more.
    assert 1.96 < (high - low) / 2 / report["std_err"] < 2.7
    assert report["matvecs"] == 120
    assert report["n"] == 1138


def test_tag_and_xnystrace(capsys):
    arguments = ("trace", BUS, "--estimator", "xnystrace", "--exact")
    report = run_json(capsys, *arguments, "--tag", "psd")
    assert abs(report["estimate"] - EXACT) < 5 * report["std_err"]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "--tag psd" in err


@pytest.mark.parametrize("options", [(), ("--dtype", "float32"), ("--estimator", "exact")])
def test_what_is_stored_in_a_file_is_exact(capsys, options):
    report = run_json(capsys, "trace", BUS, *options, "--exact")
    assert report["estimate"] == pytest.approx(EXACT, rel=1e-6)
    assert (report["std_err"], report["matvecs"], report["error_in_std_errs"]) == (0.0, 0, 0.0)
    assert report["interval"] == [report["estimate"]] * 2
    # The diagonal of the same file, which nobody has to ask an estimator for either.
    report = run_json(capsys, "diagonal", BUS, *options, "--exact")
    assert report["sum"] == pytest.approx(EXACT, rel=1e-6)
    assert (report["rms_std_err"], report["matvecs"], report["relative_error"]) == (0.0, 0, 0.0)


def test_seed_and_dtype(capsys):
    arguments = "trace", BUS, "--estimator", "xtrace", "-k", 20, "--seed"
    reports = [run_json(capsys, *arguments, seed) for seed in (1, 1, 2)]
    assert reports[0]["estimate"] == reports[1]["estimate"] != reports[2]["estimate"]
    single = run_json(capsys, *arguments, 1, "--dtype", "float32")
    assert single["dtype"] == "float32"


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
    report = run_json(capsys, "trace", path, "-k", 12)
    assert report["estimate"] == pytest.approx(np.trace(matrix), rel=1e-14)
    assert report["std_err"] == 0


def test_complex_matrix(capsys, tmp_path):
    matrix = np.random.default_rng(0).standard_normal((2, 8, 8))
    matrix = matrix[0] + 1j * matrix[1]
    np.save(tmp_path / "complex.npy", matrix)
    report = run_json(capsys, "trace", tmp_path / "complex.npy", "-k", 8)
    assert report["estimate"] == pytest.approx([np.trace(matrix).real, np.trace(matrix).imag])


def test_single_probe_has_no_interval_to_speak_of(capsys, tmp_path):
    np.save(tmp_path / "a.npy", np.eye(9) + 1)
    report = run_json(capsys, "trace", tmp_path / "a.npy", "-k", 1, "--estimator", "hutchinson")
    assert report["std_err"] is None
    assert report["interval"] == [None, None]


def test_nan_in_the_file_is_said(capsys, tmp_path):
    matrix = np.eye(9)
    matrix[2, 3] = np.nan
    np.save(tmp_path / "nan.npy", matrix)
    code, out, err = run(capsys, "trace", tmp_path / "nan.npy", "-k", 4, "--json")
    assert code == 1
    assert json.loads(out)["estimate"] is None
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
     ["trace", BUS, "--estimator", "magic"], ["trace", BUS, "--seed", "-1"],
     ["trace", BUS, "--dtype", "int8"], ["trace", BUS, "--top", "3"], ["diagonal"],
     ["diagonal", BUS, "--estimator", "xtrace"], ["diagonal", BUS, "--top", "0"]],
)  # fmt: skip
def test_bad_arguments_exit_with_2(capsys, arguments):
    check_usage(capsys, arguments)


def test_small_budget_is_raised_with_a_note(capsys):
    code, out, err = run(capsys, "trace", BUS, "-k", 1, "--estimator", "xtrace", "--json")
    assert code == 0
    assert json.loads(out)["matvecs"] == 2
    assert "raised to 2" in err


def save_matrix(folder, *, complex_entries=False, n=40):
    """A semidefinite matrix with a decaying spectrum, in a file."""
    parts = np.random.default_rng(1).standard_normal((2, n, n))
    basis, _ = np.linalg.qr(parts[0] + 1j * parts[1] if complex_entries else parts[0])
    matrix = (basis / np.arange(1, n + 1) ** 1.5) @ basis.conj().T
    np.save(folder / "matrix.npy", matrix)
    return folder / "matrix.npy", matrix.diagonal()


def test_table_of_the_diagonal_of_the_sample_matrix(capsys):
    code, out, err = run(capsys, "diagonal", BUS, "-k", 60, "--exact", "--top", 3)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    labels = ["matrix", "estimator", "entries", "sum", "smallest entry", "largest entry",
              "standard error", "matvecs", "seconds", "result", "relative error",
              "within 2 errors", "", "index (from 0)"]  # fmt: skip
    for label, line in zip(labels, lines, strict=False):
        assert line[:16].rstrip() == label
    assert lines[2].split() == ["entries", "1138"]
    assert "(root mean square)" in lines[6]
    assert len(lines) == len(labels) + 3
    assert lines[len(labels)].split()[0] in lines[5]  # the largest entry leads the list


@pytest.mark.parametrize("estimator", ["hutchinson", "diag++", "xdiag", "xnysdiag"])
def test_estimates_of_a_diagonal(capsys, tmp_path, estimator):
    path, exact = save_matrix(tmp_path)
    out = tmp_path / "out.npy"
    arguments = ["-k", 30, "--estimator", estimator, "--exact", "--top", 4, "--output", out]
    arguments += ["--tag", "psd"] if estimator == "xnysdiag" else []
    report = run_json(capsys, "diagonal", path, *arguments)
    values, std_errs = np.load(out)
    assert (report["n"], report["matvecs"], report["estimator"]) == (40, 30, estimator)

    errors = np.abs(values - exact)
    assert 0 < report["rms_std_err"] == pytest.approx(np.sqrt(np.mean(std_errs**2)))
    relative = np.linalg.norm(errors) / np.linalg.norm(exact)
    assert report["relative_error"] == pytest.approx(relative)
    assert report["within_two_std_errs"] == pytest.approx(np.mean(errors <= 2 * std_errs))
    # 91 % to 95 % by Student's t with 9 to 29 degrees of freedom; 80 % is 2.4 binomial deviations
    # of 40 entries below that.
    assert report["within_two_std_errs"] >= 0.8

    def entry(index):
        return {"index": index, "estimate": values[index], "std_err": std_errs[index]}

    assert report["sum"] == pytest.approx(values.sum())
    assert report["smallest"] == entry(values.argmin())
    assert report["largest"] == entry(values.argmax())
    assert report["top"] == [entry(i) for i in np.argsort(-np.abs(values))[:4]]


def test_extremes_count_signs_and_the_list_magnitudes(capsys, tmp_path):
    np.save(tmp_path / "a.npy", np.diag([1.0, -7.0, 3.0, 0.5]))
    report = run_json(capsys, "diagonal", tmp_path / "a.npy", "--exact")
    assert report["smallest"] == {"index": 1, "estimate": -7.0, "std_err": 0.0}
    assert report["largest"] == {"index": 2, "estimate": 3.0, "std_err": 0.0}
    assert [entry["index"] for entry in report["top"]] == [1, 2, 0, 3]  # 5 wanted, 4 there
    assert (report["rms_std_err"], report["sum"]) == (0.0, -2.5)
    assert (report["relative_error"], report["within_two_std_errs"]) == (0.0, 1.0)


def test_exact_diagonal(capsys):
    report = run_json(capsys, "diagonal", BUS, "--estimator", "exact", "--exact")
    assert report["sum"] == pytest.approx(EXACT, abs=1e-6)
    assert (report["relative_error"], report["within_two_std_errs"]) == (0.0, 1.0)
    assert (report["rms_std_err"], report["matvecs"]) == (0.0, 0)


def test_seed_and_dtype_of_a_diagonal(capsys, tmp_path):
    path, _ = save_matrix(tmp_path)
    arguments = ("diagonal", path, "--estimator", "xdiag", "-k", 10, "--seed")
    reports = [run_json(capsys, *arguments, seed) for seed in (1, 1, 2)]
    assert reports[0]["top"] == reports[1]["top"] != reports[2]["top"]
    single = run_json(capsys, *arguments, 1, "--dtype", "float32", "--exact")
    assert single["dtype"] == "float32"
    assert single["sum"] == pytest.approx(reports[0]["sum"], rel=1e-4)


def test_complex_diagonal(capsys, tmp_path):
    path, exact = save_matrix(tmp_path, complex_entries=True)
    np.save(path, 1j * np.load(path))
    out = tmp_path / "out.npy"
    arguments = ("diagonal", path, "--estimator", "xdiag", "-k", 20, "--exact", "--output", out)
    report = run_json(capsys, *arguments)
    values, std_errs = np.load(out)
    assert report["sum"] == pytest.approx([values.sum().real, values.sum().imag])
    assert (std_errs.real > 0).all()
    assert (std_errs.imag == 0).all()
    assert report["within_two_std_errs"] == np.mean(
        np.abs(values - 1j * exact) <= 2 * std_errs.real
    )
    sizes = np.abs(values)
    for name, index in {"smallest": sizes.argmin(), "largest": sizes.argmax()}.items():
        value = values[index]
        expected = {
            "index": index,
            "estimate": [value.real, value.imag],
            "std_err": std_errs[index],
        }
        assert report[name] == expected
    code, table, err = run(capsys, *arguments)
    assert (code, err, table.count("(by magnitude)")) == (0, "", 2)


@pytest.mark.parametrize("complex_entries", [False, True])
def test_output_as_text_is_that_of_npy(capsys, tmp_path, complex_entries):
    path, _ = save_matrix(tmp_path, complex_entries=complex_entries)
    names = ["real", "imag", "std_err"] if complex_entries else ["estimate", "std_err"]
    for suffix in ("npy", "txt", "CSV"):
        out = tmp_path / f"out.{suffix}"
        assert run(capsys, "diagonal", path, "-k", 6, "--output", out)[0] == 0
    array = np.load(tmp_path / "out.npy")
    assert array.shape == (2, 40)
    assert array.dtype == (np.complex128 if complex_entries else np.float64)
    columns = [array[0].real, array[0].imag, array[1].real] if complex_entries else list(array)

    text, csv = tmp_path / "out.txt", tmp_path / "out.CSV"
    assert text.read_text().splitlines()[0] == "# " + " ".join(names)
    assert csv.read_text().splitlines()[0] == ",".join(names)
    np.testing.assert_array_equal(np.loadtxt(text), np.transpose(columns))
    table = np.loadtxt(csv, delimiter=",", skiprows=1)
    np.testing.assert_array_equal(table, np.transpose(columns))


def test_bad_output_is_said_before_computing(capsys, tmp_path, monkeypatch):
    path, _ = save_matrix(tmp_path)
    (tmp_path / "folder.txt").mkdir()
    monkeypatch.setattr("traceax.diagonal", None)  # calling it would be a TypeError
    cases = {"out.mat": "'.mat'", "out": ".npy, .txt, .csv", "folder.txt": "is a directory",
             "missing/out.npy": "no directory", "matrix.npy/out.npy": "no directory"}  # fmt: skip
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


def test_xnysdiag_needs_a_tag(capsys, tmp_path):
    path, _ = save_matrix(tmp_path)
    code, out, err = run(capsys, "diagonal", path, "--estimator", "xnysdiag")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "--tag psd" in err
    assert "--estimator xdiag" in err


def test_untrustworthy_diagonals_exit_with_1(capsys, tmp_path):
    path, _ = save_matrix(tmp_path)
    wrong = "-k", 8, "--tag", "nsd", "--estimator", "xnysdiag"
    code, out, err = run(capsys, "diagonal", path, *wrong, "--json")
    assert code == 1
    assert json.loads(out)["matvecs"] == 8
    assert "it is not" in " ".join(err.split())
    matrix = np.load(path)
    matrix[2, 3] = np.nan
    np.save(path, matrix)
    code, out, err = run(capsys, "diagonal", path, "-k", 4, "--json", "--exact")
    assert code == 1
    report = json.loads(out)
    assert (report["sum"], report["largest"]["estimate"], len(report["top"])) == (None, None, 5)
    assert "NaN" in err


def test_single_probe_of_a_diagonal_has_no_standard_error(capsys, tmp_path):
    path, _ = save_matrix(tmp_path)
    report = run_json(capsys, "diagonal", path, "-k", 1, "--estimator", "hutchinson")
    assert report["rms_std_err"] is None
    assert report["top"][0]["std_err"] is None
