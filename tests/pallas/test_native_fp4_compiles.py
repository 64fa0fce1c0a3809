"""The native FP4 programs compiled for GPUs that are not there: `pytest --gpu-compilers DIR`.

It proves that the code is generated with the instructions meant; none of it has ever run on a Blackwell GPU.
"""

import os
import pathlib
import subprocess
import sys

import pytest

import ddtree_jax
from ddtree_jax.pallas.cases.nvfp4_w4a4_matmul import CASES, CODE

HERE = pathlib.Path(__file__).parent
SM = {"b200": "sm_100a", "rtx_pro_6000": "sm_120a"}
WRONG_PLATFORM = {"b200": (), "rtx_pro_6000": ("mosaic_native",), "h200": ("triton_native", "mosaic_native")}


@pytest.fixture(scope="module")
def compilers(request: pytest.FixtureRequest) -> str:
    folder = request.config.getoption("--gpu-compilers", default=None)
    if folder is None:
        pytest.skip("needs the compilers: --gpu-compilers DIR")
    return str(pathlib.Path(folder).resolve())


@pytest.fixture(scope="module")
def check(compilers):
    """(platform, ops=, every=) -> the programs of the compile check."""
    module = pytest.importorskip("ddtree_jax.pallas.compile_check")

    def run(platform, *, ops, every=False):
        return module.compile_for(platform, compilers=compilers, ops=ops, every=every).programs

    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("platform", ["b200", "rtx_pro_6000", "h200"])
def test_products_of_codes(check, platform, tmp_path):
    """Every case compiles with the instructions of `CODE`, and no platform takes another's program."""
    ops = tmp_path / "ops.py"
    ops.write_text(
        "from ddtree_jax.pallas.api import OPS\n"
        "from ddtree_jax.pallas.cases.nvfp4_w4a4_matmul import CASES, CODE\n"
        "from ddtree_jax.pallas.cases.registry import Expected\n"
        "OPS = {name: OPS[name] for name in ('nvfp4_w4a4_matmul',)}\n"
        "EXPECTED = {('nvfp4_w4a4_matmul', name): Expected(code=code) for name, code in CODE.items()}\n"
    )
    programs = check(platform, ops=ops, every=True)
    assert len(programs) == len(CASES) * len(CODE)
    # Missing, or of a version that does not work with this JAX.
    missing = {
        program["implementation"]: program["detail"] for program in programs if "jax-triton" in program["detail"]
    }
    for program in programs:
        name = f"{program['implementation']}, {program['case']}"
        assert program["status"] != "failed", f"{name}: {program['detail']}"
        if program["implementation"] in {*WRONG_PLATFORM[platform], *missing}:
            assert program["status"] == "not served", name
        elif "kv_a" in program["case"]:  # 576 is no multiple of 128
            assert program["status"] == ("not served" if platform == "b200" else "ok"), name
        else:
            assert program["status"] == "ok", f"{name}: {program['detail']}"
        if program["status"] == "ok":
            assert SM[platform] in program["sm"], name
            backend = program["implementation"].removesuffix("_native")
            assert program["kernels"] == [f"nvfp4_w4a4_matmul_{backend}"], name
    served = {program["implementation"] for program in programs if program["status"] == "ok"}
    assert served == set(CODE) - set(WRONG_PLATFORM[platform]) - set(missing)
    if missing:
        pytest.skip(f"{served or 'nothing'} compiles, but {missing}")


@pytest.mark.parametrize("platform", ["b200", "rtx_pro_6000"])
def test_the_converter_compiles_for_blackwell(check, platform):
    programs = check(platform, ops=HERE / "native_fp4_programs.py", every=True)
    assert [program["status"] for program in programs] == ["ok", "ok"], [program["detail"] for program in programs]
    assert all(SM[platform] in program["sm"] for program in programs)


def test_the_converter_is_refused_for_hopper(check):
    """The control: a check that sees no such error would see nothing else either."""
    programs = check("h200", ops=HERE / "native_fp4_programs.py", every=True)
    assert len(programs) == 2
    for program in programs:
        assert program["status"] == "failed"
        assert "cvt.f16x2.e2m1x2" in program["detail"] and "sm_90a" in program["detail"]


def test_the_triton_source_in_tritons_interpreter(compilers):
    if not pathlib.Path(compilers, "triton").is_dir():
        pytest.skip("no triton among the compilers")
    paths = [str(pathlib.Path(ddtree_jax.__file__).parents[1]), compilers]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(HERE / "triton_fp4_interpreted.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("parts:") == 6
