"""The report on kernels, with small operations on the CPU that stand for them."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from ddtree_jax.pallas import kernel_report, measure
from ddtree_jax.pallas.backend import HOST
from ddtree_jax.pallas.cases.registry import Registry, load_registry
from ddtree_jax.pallas.dispatch import Op

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
TOYS = load_registry(HERE / "toy_ops.py")
PRODUCT = TOYS.cases[0]
LIMITS = measure.Limits(copy=1e9, matmul=1e12, launch=1e-6)


def measured(registry, **options):
    settings = {"limits": lambda: LIMITS, "sample_s": 0.002, "threads": 2, **options}
    return kernel_report.measure_kernels(registry, HOST, **settings)


def registry_of(case, **implementations):
    return Registry({case.op: Op(case.op, {"reference": toy("reference"), **implementations}, {})}, (case,))


def toy(name):
    return TOYS.ops["toy_product"].implementations[name]


def toy_function(name):
    import runpy

    return runpy.run_path(str(HERE / "toy_ops.py"))[name]


@pytest.fixture(autouse=True, scope="module")
def timing():
    """Every call takes 2 us: what is timed here is too small for the clock, and test_measure.py has the clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.Loop, "time", lambda self, inputs, **options: measure.Timing(2.0, 0.1))
        yield


@pytest.fixture(scope="module")
def report(timing):
    return measured(TOYS, seed=7)


def test_every_case_by_every_implementation_and_baseline(report):
    names = [(row.op, row.case, row.implementation) for row in report.rows]
    products = ("fast", "hopper_only", "reference", "xla: einsum")
    assert names == [
        *(("toy_product", rows, name) for rows in ("4 rows", "8 rows") for name in products),
        ("toy_row", "a cache of 10", "reference"),
    ]
    assert report.healthy and report.seed == 7


def test_a_row_has_time_rate_share_and_error(report):
    row = report.rows[0]
    assert (row.status, row.detail, row.unit, row.tolerance) == ("ok", "", "GB/s", 1e-5)
    assert (row.us, row.spread) == (2.0, 0.1)
    assert 0 < row.error < 1e-6
    assert row.rate == pytest.approx(PRODUCT.traffic / row.us / 1e3)
    assert row.share == pytest.approx(PRODUCT.traffic / LIMITS.copy / (row.us * 1e-6))
    assert report.rows[-1].error < 1e-6, "an operation that changes a cache in place"


def test_a_time_that_the_clock_cannot_tell_is_none(monkeypatch):
    monkeypatch.setattr(measure.Loop, "time", lambda self, inputs, **options: measure.Timing(-1.0, 3.0))
    row = measured(registry_of(PRODUCT)).rows[0]
    assert (row.status, row.us, row.rate, row.share) == ("ok", None, None, None)
    assert row.cells()[-1] == "ok: no time: the machine is too busy to tell"


def test_what_arithmetic_limits_is_told_in_operations():
    case = dataclasses.replace(PRODUCT, traffic=1, flops=10**6)
    row = measured(registry_of(case)).rows[0]
    assert row.unit == "TFLOP/s" and row.rate == pytest.approx(10**6 / row.us / 1e6)
    assert row.share == pytest.approx(1.0 / row.us)


def test_what_does_not_serve_is_no_fault(report):
    row = report.rows[1]
    assert (row.status, row.detail, row.us, row.error) == ("not served", "needs a Hopper GPU", None, None)


def test_wrong_numbers_and_faults_make_it_unhealthy():
    report = measured(registry_of(PRODUCT, wrong=toy_function("wrong"), broken=toy_function("broken")))
    wrong, broken, reference, baseline = report.rows
    assert (wrong.status, wrong.detail) == ("wrong", "error above 1.0e-05")
    assert wrong.error == pytest.approx(0.5, rel=1e-4) and wrong.us > 0
    assert (broken.status, broken.detail) == ("failed", "RuntimeError: no such instruction in this program")
    assert reference.status == baseline.status == "ok"
    assert not report.healthy
    for bad in ("wrong", "failed"):
        assert not dataclasses.replace(report, rows=(kernel_report.Row("a", "b", "c", bad),)).healthy
    for good in ("ok", "not served", "left out"):
        assert dataclasses.replace(report, rows=(kernel_report.Row("a", "b", "c", good),)).healthy


def test_an_answer_that_is_not_finite_is_wrong():
    def poisoned(x, w, *, platform, scale):
        return (x @ w * scale).at[0, 0].set(float("nan"))

    row = measured(registry_of(PRODUCT, poisoned=poisoned)).rows[0]
    assert row.status == "wrong" and row.error == math.inf


def test_a_baseline_may_lay_its_answer_out_in_another_way():
    case = dataclasses.replace(PRODUCT, baselines={"transposed": lambda x, w: (2.0 * x @ w).T, "bad": lambda x, w: x})
    rows = measured(registry_of(case)).rows
    assert [(row.implementation, row.status, row.error) for row in rows[1:]] == [
        ("xla: transposed", "ok", None),
        ("xla: bad", "ok", None),
    ]


def test_without_references_and_baselines():
    names = [row.implementation for row in measured(TOYS.select("toy_product", "4 rows"), reference=False).rows]
    assert names == ["fast", "hopper_only"]


def test_the_exact_answer_is_worked_out_once_a_case():
    calls = []

    def exact(x, w):
        calls.append(1)
        return PRODUCT.exact(x, w)

    measured(registry_of(dataclasses.replace(PRODUCT, exact=exact), fast=toy("fast")))
    assert len(calls) == 1


def test_inputs_follow_the_seed_and_not_the_selection():
    seen = []

    def exact(x, w):
        seen.append(np.asarray(x))
        return PRODUCT.exact(x, w)

    case = dataclasses.replace(PRODUCT, exact=exact)
    alone = registry_of(case)
    beside = Registry(alone.ops, (dataclasses.replace(PRODUCT, name="another"), case))
    for registry, seed in ((alone, 1), (beside, 1), (alone, 2), (alone, None), (alone, None)):
        measured(registry, seed=seed, reference=True)
    first, again, other, *free = seen
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other) and not np.array_equal(*free)


def test_nothing_compiles_while_times_are_taken(monkeypatch):
    order = []
    init, timed = measure.Loop.__init__, measure.Loop.time  # the one that takes 2 us
    monkeypatch.setattr(measure.Loop, "__init__", lambda self, *a: (init(self, *a), order.append("compiled"))[0])
    monkeypatch.setattr(measure.Loop, "time", lambda self, *a, **k: (order.append("timed"), timed(self, *a, **k))[1])
    measured(TOYS.select("toy_product", "4 rows"), limits=lambda: order.append("limits") or LIMITS)
    assert order == ["compiled"] * 3 + ["limits"] + ["timed"] * 3


def test_a_budget_leaves_out_the_rest_but_something_of_every_operation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(kernel_report.time, "perf_counter", lambda: now[0])
    progress = []

    def told(text):
        progress.append(text)
        now[0] += 4.0

    report = measured(TOYS, budget_s=10.0, progress=told)
    # 4 s compile, 4 s each case: the third starts after the budget.
    assert progress[1:] == ["4 s  toy_product, 4 rows", "8 s  toy_row, a cache of 10"]
    left_out = [row for row in report.rows if row.status == "left out"]
    assert {row.case for row in left_out} == {"8 rows"} and {row.detail for row in left_out} == {"no time left"}
    assert report.healthy


def test_what_does_not_compile_in_time_is_left_out():
    def slow(x, w, *, platform, scale):
        time.sleep(0.4)
        return x @ w * scale

    rows = measured(registry_of(PRODUCT, slow=slow), budget_s=0.2, threads=1).rows
    assert [(row.status, row.detail) for row in rows] == [("left out", "not compiled in time")] * 3


def test_table_json_and_markdown_say_the_same(report, tmp_path):
    lines = report.text().splitlines()
    assert lines[0] == report.title() and "cpu" in lines[0] and "jax " in lines[0]
    assert lines[1] == "copy 1 GB/s, bfloat16 product 1 TFLOP/s, launch 1.0 us, seed 7"
    assert lines[2].split() == ["kernel", "shape", "implementation", "us", "rate", "of", "limit", "error"]
    assert len(lines) == 3 + len(report.rows)
    assert lines[4].endswith("not served: needs a Hopper GPU")
    path, table = report.write(tmp_path / "found.json")
    assert (path.name, table.name) == ("found.json", "found.md")
    document = json.loads(path.read_text())
    assert document["healthy"] is True and document["device"]["generation"] == "cpu"
    assert document["versions"]["jax"] and document["date"].endswith("+00:00")
    assert [row["implementation"] for row in document["rows"]] == [row.implementation for row in report.rows]
    markdown = table.read_text().splitlines()
    assert markdown[4].count("|") == markdown[5].count("|") == 9
    served = [row for row in report.rows if row.status != kernel_report.NOT_SERVED]
    assert 0 < len(served) < len(report.rows) and len(markdown) == 6 + len(served)


def test_infinity_is_no_json_and_a_bar_no_column(report, tmp_path):
    row = kernel_report.Row("a|b", "c", "d", "wrong", "x", error=math.inf)
    path, table = dataclasses.replace(report, rows=(row,)).write(tmp_path / "x.json")
    assert json.loads(path.read_text())["rows"][0]["error"] == "inf"
    assert "a\\|b" in table.read_text()


def benchmark(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--ops", str(HERE / "toy_ops.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_the_benchmark_lists_and_refuses():
    done = benchmark("--list", "--op", "toy_product")
    assert done.returncode == 0
    names = "fast, hopper_only, reference, xla: einsum"
    assert done.stdout == f"toy_product: 4 rows: {names}\ntoy_product: 8 rows: {names}\n"
    for arguments in (("--case", "nothing"), ("--resume",), ("--resume", "--json", str(HERE / "toy_ops.py"))):
        done = benchmark(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.slow
def test_the_benchmark_measures(tmp_path):
    done = benchmark("--case", "4 rows", "--json", str(tmp_path / "k.json"), "--seed", "3", "--profile")
    assert done.returncode == 0, done.stderr
    assert "fast" in done.stdout and "wrote" in done.stdout
    assert json.loads((tmp_path / "k.json").read_text())["seed"] == 3


@pytest.mark.slow
def test_the_benchmark_goes_on_where_it_was_stopped(tmp_path):
    path = tmp_path / "k.json"

    def resume(rows, *arguments, versions=None):
        path.write_text(json.dumps({**first, "rows": rows, "versions": versions or first["versions"]}))
        done = benchmark("--json", str(path), "--seed", "4", "--resume", *arguments)
        return done, json.loads(path.read_text())["rows"]

    assert benchmark("--json", str(path), "--seed", "3").returncode == 0
    first = json.loads(path.read_text())
    names = [(row["case"], row["implementation"]) for row in first["rows"]]
    # One case is whole, one lacks an implementation, and one has not been begun.
    given = [row for row in first["rows"] if row["case"] != "a cache of 10"]
    given = [row for row in given if (row["case"], row["implementation"]) != ("8 rows", "fast")]
    done, rows = resume(given)
    assert done.returncode == 0 and [(row["case"], row["implementation"]) for row in rows] == names
    assert rows[:4] == first["rows"][:4] and rows[4:] != first["rows"][4:]
    # What is wrong stays in the file until it has been measured again.
    wrong = [dict(row) for row in first["rows"]]
    wrong[4].update(status="wrong", error="inf")
    done, rows = resume(wrong, "--op", "toy_row")
    assert done.returncode == 1 and [(row["case"], row["implementation"]) for row in rows] == names
    assert rows[4]["status"] == "wrong"
    done, rows = resume(wrong)
    assert done.returncode == 0 and rows[:4] == first["rows"][:4] and rows[4]["status"] == "ok"
    done, rows = resume(wrong, versions={"jax": "0.0"})
    assert done.returncode == 2 and rows == wrong and done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 5])
def test_processes_share_the_cases(tmp_path, processes):
    done = benchmark("--processes", str(processes), "--json", str(tmp_path / "k.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "k.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["4 rows"] * 4 + ["8 rows"] * 4 + ["a cache of 10"]
    assert all(row["status"] in ("ok", "not served") for row in rows)
