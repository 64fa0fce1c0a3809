"""The doctor on kernels: which ones this machine takes, and whether they are right, by small operations."""

import json
import pathlib

import pytest

from ddtree_jax import cli, doctor
from ddtree_jax.pallas import backend, kernel_report, measure
from ddtree_jax.pallas.cases import registry
from ddtree_jax.pallas.cases.registry import Registry, load_registry
from ddtree_jax.pallas.dispatch import Op

TOYS = load_registry(pathlib.Path(__file__).parents[1] / "pallas" / "toy_ops.py")
LIMITS = measure.Limits(copy=1e12, matmul=1e14, launch=1e-6)


@pytest.fixture
def toys(monkeypatch) -> None:
    monkeypatch.setattr(registry, "load_registry", lambda: TOYS)


@pytest.fixture
def hopper(monkeypatch) -> None:
    monkeypatch.setattr(backend, "current_platform", lambda: backend.H200)


@pytest.fixture
def quick(monkeypatch, tmp_path) -> list[str]:
    """The folder to write into; times of 1 us; the budgets that were asked for."""
    budgets = []
    measured = kernel_report.measure_kernels

    def once(chosen, platform, *, budget_s, progress):
        budgets.append(budget_s)
        return measured(chosen, platform, limits=lambda: LIMITS, threads=1)

    monkeypatch.setattr(kernel_report, "measure_kernels", once)
    monkeypatch.setattr(measure.Loop, "time", lambda self, inputs, **options: measure.Timing(1.0, 0.0))
    monkeypatch.chdir(tmp_path)
    return budgets


def kernels(findings: list[doctor.Finding]) -> dict[str, tuple[str, str]]:
    return {finding.name: (finding.status, finding.value) for finding in findings}


def test_on_a_cpu_the_kernels_say_why_not(monkeypatch):
    product = TOYS.ops["toy_product"]
    names = ("hopper_only", "reference")
    without = Op("toy_product", {name: product.implementations[name] for name in names}, {})
    table = Registry({**TOYS.ops, "toy_product": without}, TOYS.cases)
    monkeypatch.setattr(registry, "load_registry", lambda: table)
    assert kernels(doctor._kernels()) == {
        "kernel toy_product": ("info", "not available: plain JAX serves (hopper_only: needs a Hopper GPU)"),
        "kernel toy_row": ("ok", "reference for a cache of 10"),
    }


def test_what_is_taken_and_why_the_others_are_not(toys):
    value = "fast for 4 rows (hopper_only: needs a Hopper GPU)"
    assert kernels(doctor._kernels())["kernel toy_product"] == ("ok", value)


def test_the_order_of_the_generation_decides(toys, hopper):
    assert kernels(doctor._kernels())["kernel toy_product"] == ("ok", "hopper_only for 4 rows (fast: by name only)")


def test_where_no_kernel_has_run_they_are_asked_for(monkeypatch):
    product = Op("toy_product", TOYS.ops["toy_product"].implementations, {backend.BLACKWELL: ("fast",)})
    table = Registry({**TOYS.ops, "toy_product": product}, TOYS.cases)
    monkeypatch.setattr(registry, "load_registry", lambda: table)
    monkeypatch.setattr(backend, "current_platform", lambda: backend.B200)
    status, value = kernels(doctor._kernels())["kernel toy_product"]
    assert status == "ok" and "fast for 4 rows, only with kernels='all': never run on such a GPU" in value


def test_an_operation_that_nothing_serves_is_bad(toys, monkeypatch):
    def nothing(*arrays, **options):
        raise NotImplementedError("not today")

    op = Op("toy_row", {"reference": nothing}, {})
    monkeypatch.setattr(registry, "load_registry", lambda: Registry({"toy_row": op}, TOYS.select("toy_row").cases))
    assert kernels(doctor._kernels()) == {
        "kernel toy_row": ("bad", "not available: nothing serves a cache of 10 (reference: not today)")
    }


def test_the_report_of_the_doctor_has_them(library, toys):
    found = {finding.name: finding for finding in doctor.examine().findings}
    assert found["kernel toy_product"].status == "ok"


def test_the_package_s_own_operations_explain_themselves_on_a_cpu():
    for finding in doctor._kernels():
        assert finding.status in ("ok", "info"), finding
        assert finding.status == "ok" or "compute capability" in finding.value or "plain JAX" in finding.value


def test_kernels_without_a_gpu_are_one_line_and_status_2(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--kernels"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert "needs a GPU" in error and "this is a CPU" in error
    assert list(tmp_path.iterdir()) == []


def test_kernels_writes_a_report_to_send(toys, hopper, quick, capsys, tmp_path):
    assert cli.main(["doctor", "--kernels"]) == 0
    out, error = capsys.readouterr()
    assert error == "" and quick == [doctor._KERNELS_BUDGET_S]
    assert "hopper_only" in out and out.splitlines()[-1] == "wrote kernels-report.json and kernels-report.md"
    rows = json.loads((tmp_path / "kernels-report.json").read_text())["rows"]
    assert {row["status"] for row in rows} == {"ok"} and {row["us"] for row in rows} == {1.0}
    assert "| toy_product | 4 rows | hopper_only |" in (tmp_path / "kernels-report.md").read_text()


def test_another_name_and_json_on_stdout(toys, hopper, quick, capsys, tmp_path):
    assert cli.main(["doctor", "--kernels", "--json", "mine.json"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "wrote mine.json and mine.md"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "mine.md"]
    assert cli.main(["doctor", "--kernels", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True
    assert (tmp_path / "kernels-report.json").exists()


def test_a_kernel_with_wrong_numbers_is_status_1(hopper, quick, capsys, monkeypatch, tmp_path):
    def wrong(x, w, *, platform, scale):
        return x @ w

    op = Op("toy_product", {"wrong": wrong, "reference": TOYS.ops["toy_product"].implementations["reference"]}, {})
    table = Registry({"toy_product": op}, TOYS.select("toy_product").cases)
    monkeypatch.setattr(registry, "load_registry", lambda: table)
    assert cli.main(["doctor", "--kernels"]) == 1
    out, error = capsys.readouterr()
    assert "wrong: error above" in out and error == ""
    assert json.loads((tmp_path / "kernels-report.json").read_text())["healthy"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernels", "--target", "x"], "--kernels: not allowed with --target"),
        (["--kernels", "--context", "5"], "--target: needed beside"),
        (["--json", "file"], "--json: takes a FILE only with --kernels"),
        (["--kernels", "--json", "no/such/folder/x.json"], "cannot write 'no/such/folder/x.json'"),
        (["--kernels", "--json", "."], "cannot write '.'"),
        (["--kernels", "--json", ""], "cannot write ''"),
        (["--kernels", "--json", "report.md"], "cannot write 'report.md'"),
    ],
)
def test_bad_usage_is_one_line(arguments, words, hopper, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error
