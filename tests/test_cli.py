"""The command line, in this process (`main`) and once as a program."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from traceax._cli import main

BUS = Path(__file__).parent.parent / "traceax" / "data" / "1138_bus.mtx"
EXACT = 973900.4097233


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_sample_matrix_as_the_readme_runs_it():
    command = [sys.executable, "-m", "traceax", "trace", BUS, "-k", "200", "--exact"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for row in ("estimate", "standard error", "95 % interval", "matvecs", "seconds", "exact trace"):
        assert any(line.startswith(row) for line in result.stdout.splitlines()), row
    assert "973900.4097233" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("estimator", ["auto", "hutchinson", "hutch++", "xtrace"])
def test_estimates_of_the_sample_matrix(capsys, estimator):
    report = run_json(capsys, "trace", BUS, "-k", 120, "--exact", "--estimator", estimator)
    assert report["exact"] == pytest.approx(EXACT, abs=1e-6)
    assert abs(report["estimate"] - EXACT) < 5 * report["std_err"]
    assert report["error_in_std_errs"] == pytest.approx(
        abs(report["estimate"] - report["exact"]) / report["std_err"]
    )
    low, high = report["interval"]
    # The Student-t quantile is a little above the normal one.
    assert 1.96 < (high - low) / 2 / report["std_err"] < 2.2
    assert report["matvecs"] == 120
    assert report["n"] == 1138


def test_tag_and_xnystrace(capsys):
    arguments = ("trace", BUS, "--estimator", "xnystrace", "--exact")
    report = run_json(capsys, *arguments, "--tag", "psd")
    assert abs(report["estimate"] - EXACT) < 5 * report["std_err"]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "--tag psd" in err


def test_exact_estimator(capsys):
    report = run_json(capsys, "trace", BUS, "--estimator", "exact", "--exact")
    assert report["estimate"] == pytest.approx(EXACT, abs=1e-6)
    assert (report["std_err"], report["matvecs"]) == (0.0, 1138)


def test_seed_and_dtype(capsys):
    reports = [run_json(capsys, "trace", BUS, "-k", 20, "--seed", seed) for seed in (1, 1, 2)]
    assert reports[0]["estimate"] == reports[1]["estimate"] != reports[2]["estimate"]
    single = run_json(capsys, "trace", BUS, "-k", 20, "--seed", 1, "--dtype", "float32")
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
     ["trace", BUS, "--dtype", "int8"]],
)  # fmt: skip
def test_bad_arguments_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    assert "usage: traceax" in capsys.readouterr().err


def test_small_budget_is_raised_with_a_note(capsys):
    code, out, err = run(capsys, "trace", BUS, "-k", 1, "--estimator", "xtrace", "--json")
    assert code == 0
    assert json.loads(out)["matvecs"] == 2
    assert "raised to 2" in err
