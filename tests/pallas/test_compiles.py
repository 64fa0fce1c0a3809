"""Every kernel compiles for H200, B200 and RTX PRO 6000, and the check that says so sees what must not pass.

This shows that code is generated: neither that its numbers are right nor that it is fast.
"""

import concurrent.futures
import json
import pathlib
import subprocess
import sys

import pytest

from ddtree_jax.pallas import compile_check
from ddtree_jax.pallas.cases.registry import load_registry
from ddtree_jax.pallas.compile_targets import TARGETS
from ddtree_jax.pallas.dispatch import REFERENCE

CONTROLS = pathlib.Path(__file__).with_name("compile_controls.py")
PLATFORMS = compile_check.PLATFORMS


@pytest.fixture(scope="module")
def compilers(request) -> str:
    folder = request.config.getoption("gpu_compilers")
    if folder is None:
        pytest.skip("no compilers for GPUs: sh .ci/gpu-compilers DIR && pytest --gpu-compilers DIR (on Linux)")
    return folder


def compile_everywhere(compilers: str, **options) -> dict[str, compile_check.Report]:
    def one(platform: str) -> compile_check.Report:
        return compile_check.compile_for(platform, compilers=compilers, **options)

    with concurrent.futures.ThreadPoolExecutor(len(PLATFORMS)) as pool:
        return dict(zip(PLATFORMS, pool.map(one, PLATFORMS), strict=True))


@pytest.fixture(scope="module")
def controls(compilers) -> dict[str, compile_check.Report]:
    return compile_everywhere(compilers, ops=CONTROLS)


@pytest.fixture(scope="module")
def kernels(compilers) -> dict[str, compile_check.Report]:
    if not load_registry().ops:
        pytest.skip("there is no operation yet")
    return compile_everywhere(compilers)


def programs(report: compile_check.Report, op: str) -> list[dict]:
    return [program for program in report.programs if program["op"] == op]


def only(report: compile_check.Report, op: str) -> dict:
    (program,) = programs(report, op)
    return program


def assert_all_compile(report: compile_check.Report) -> None:
    assert not report.failed, report.text()
    ops = load_registry().ops
    generation = TARGETS[report.platform].platform.generation
    for name, op in ops.items():
        for implementation in set(op.order.get(generation, ())) - {REFERENCE}:
            done = [p for p in programs(report, name) if p["implementation"] == implementation]
            assert any(p["status"] == "ok" for p in done), f"{name} {implementation} serves no case on {generation}"


@pytest.mark.timeout(1200)  # the fixture: minutes of compiling on two cores
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_choice_of_tiles_compiles(kernels, platform):
    assert_all_compile(kernels[platform])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_case_compiles(compilers):
    if not load_registry().ops:
        pytest.skip("there is no operation yet")
    for report in compile_everywhere(compilers, every=True).values():
        assert_all_compile(report)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_good_kernel_passes_and_is_named(controls, platform):
    first, second, other_tiles, not_served = programs(controls[platform], "product")
    for program in (first, other_tiles):
        assert (program["status"], program["detail"]) == ("ok", "")
        assert program["sm"] == [TARGETS[platform].sm]
        assert program["kernels"] == ["control_product_64_128"]
        assert program["custom_calls"] == ["__gpu$xla.gpu.triton"]
        used = program["resources"]["control_product_64_128"]
        assert used["registers"] > 16 and used["spill_stores"] == used["spill_loads"] == 0
    assert first["resources"] != other_tiles["resources"]
    # Other arrays, and the same tiles: not compiled again.
    assert second["status"] == "same tiles"
    assert (not_served["status"], not_served["detail"]) == ("not served", "N = 96 is no multiple of 64")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_expected_instructions_are_looked_for(controls, platform):
    assert only(controls[platform], "wide_product")["status"] == "ok"
    missing = only(controls[platform], "missing_instruction")
    if platform == "h200":
        assert missing["status"] == "failed" and "'no.such.instruction' is neither" in missing["detail"]
    else:
        assert missing["status"] == "ok"


def test_the_converter_of_blackwell_is_rejected_by_hopper(controls):
    rejected = only(controls["h200"], "converter")
    assert rejected["status"] == "failed"
    assert "cvt.f16x2.e2m1x2' not supported on .target 'sm_90a'" in rejected["detail"]
    for platform in ("b200", "rtx_pro_6000"):
        accepted = only(controls[platform], "converter")
        assert (accepted["status"], accepted["kernels"]) == ("ok", ["control_converter"])


def test_too_much_shared_memory_is_a_failure(controls):
    for platform in ("h200", "b200"):
        assert only(controls[platform], "large_tiles")["status"] == "ok"
    program = only(controls["rtx_pro_6000"], "large_tiles")
    assert program["status"] == "failed"
    assert "Shared memory size limit exceeded" in program["detail"] and "available: 101376" in program["detail"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_fallback_to_plain_xla_is_a_failure(controls, platform):
    program = only(controls[platform], "plain")
    assert program["status"] == "failed" and "fell back to plain XLA" in program["detail"]
    assert only(controls[platform], "plain_on_purpose")["status"] == "ok"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_compiler_that_dies_is_a_failure_of_its_program(controls, platform):
    program = only(controls[platform], "crash")
    assert program["status"] == "failed" and "died with 134" in program["detail"]
    # What was done before stays.
    assert len(controls[platform].programs) == len(load_registry(CONTROLS).cases)


def test_versions_are_those_of_the_folder(controls):
    import jax

    for report in controls.values():
        assert report.versions["jax"] == report.versions["jax-cuda13-plugin"] == jax.__version__
        assert {"nvidia-cuda-nvcc", "nvidia-nvvm"} <= set(report.versions)


@pytest.mark.parametrize("platform", ["h200", "b200", pytest.param("rtx_pro_6000", marks=pytest.mark.slow)])
def test_kernels_compile_for_two_gpus(compilers, platform, tmp_path):
    """Each runs on its own part: nothing but the sums goes from one to the other, and caches are written in place."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas.compile_mesh", platform],
        env=compile_check._environment(compilers, str(tmp_path)),
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6 and all(program["kernels"] for program in found.values()), found
    sums = {op for op, program in found.items() if program["moves"]}
    assert sums == {"layer_matmul", "moe"} and all(found[op]["moves"] == ["all-reduce"] for op in sums), found
