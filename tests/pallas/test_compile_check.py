"""The compile check without compilers: what it reads out of programs, and what it says when it cannot work."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from ddtree_jax.pallas import compile_check, compile_programs
from ddtree_jax.pallas.backend import B200, H200, RTX_PRO_6000
from ddtree_jax.pallas.cases.registry import load_registry
from ddtree_jax.pallas.compile_targets import TARGETS

CONTROLS = pathlib.Path(__file__).with_name("compile_controls.py")
CALLS = {
    "__gpu$xla.gpu.triton": "jit(f)/s/first/pallas_call",
    "triton_kernel_call_ffi": "jit(f)/triton_kernel_call",
    "triton_kernel_call": "jit(f)/mine/triton_kernel_call",
    "mosaic_gpu_v2": "jit(f)/jit(g)/third/mpmd_map",
    "__cublas$gemm": "jit(f)/dot_general",
}
HLO = "\n".join(
    f'  %x.{n} = f32[4]{{0}} custom-call(%a), custom_call_target="{target}", metadata={{op_name="{name}" id=1}}'
    for n, (target, name) in enumerate(CALLS.items())
)


def test_kernels_are_told_from_other_custom_calls():
    assert compile_programs.kernels_in(HLO) == {"first", "triton_kernel_call", "mine", "third"}
    assert compile_programs.kernels_in("ENTRY %main { %d = f32[4]{0} dot(%x, %y) }") == set()


def fingerprint(m, k, n, **options):
    product = load_registry(CONTROLS).ops["product"].implementations["kernel"]
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n))]
    traced = jax.jit(lambda x, w: product(x, w, platform=H200, **options)).trace(*specs)
    (equation,) = compile_programs.kernel_equations(traced.jaxpr)
    assert compile_programs.pallas_name(equation) == f"control_product_{m}_{n}"
    return compile_programs.tile_fingerprint(traced.jaxpr)


def test_a_fingerprint_is_of_tiles_and_launch_and_not_of_whole_arrays():
    first = fingerprint(64, 256, 128)
    assert fingerprint(128, 512, 256) == first
    assert fingerprint(64, 256, 128, block=32) != first
    assert fingerprint(64, 256, 128, stages=3) != first


def test_kernels_inside_inner_programs_and_loops_are_found():
    product = load_registry(CONTROLS).ops["product"].implementations["kernel"]

    @jax.jit
    def inner(x, w):
        return product(x, w, platform=H200)

    def outer(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, total: total + inner(x, w), jnp.zeros((64, 64)))

    jaxpr = jax.make_jaxpr(outer)(jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16)).jaxpr
    assert [compile_programs.pallas_name(one) for one in compile_programs.kernel_equations(jaxpr)] == [
        "control_product_64_64"
    ]
    plain = jax.make_jaxpr(jnp.tanh)(jnp.zeros(3)).jaxpr
    assert list(compile_programs.kernel_equations(plain)) == []


def test_targets_are_the_platforms_of_the_kernels():
    assert tuple(TARGETS) == compile_check.PLATFORMS
    assert [target.platform for target in TARGETS.values()] == [H200, B200, RTX_PRO_6000]
    for target in TARGETS.values():
        text = target.description()
        assert f"shared_memory_per_block_optin: {target.platform.shared_memory}\n" in text
        assert f"core_count: {target.platform.cores} " in text
        assert ("ACCELERATED_FEATURES" in text) == (target.name == "rtx_pro_6000")
        assert text.count("{") == text.count("}")


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="this environment has a plugin itself")
def test_no_folder_and_a_folder_without_a_plugin_are_one_line(tmp_path, capsys):
    missing = tmp_path / "nowhere"
    assert compile_check.main(["--platform", "h200", "--compilers", str(missing)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"sh .ci/gpu-compilers {missing}" in error
    assert compile_check.main(["--platform", "h200", "--compilers", str(tmp_path), "--ops", str(CONTROLS)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "the CUDA plugin of JAX does not start" in error


def test_an_unknown_operation_is_bad_input(tmp_path, capsys):
    assert compile_check.main(["--platform", "b200", "--ops", str(CONTROLS), "--op", "nothing"]) == 2
    assert "op: got 'nothing'; allowed: product" in capsys.readouterr().err


def blank(**changes):
    program = {"op": "product", "implementation": "kernel", "case": "64 rows", "status": "ok", "detail": ""}
    return {**program, "resources": {}, "kernels": [], "sm": [], "custom_calls": [], "seconds": 0.0, **changes}


def test_the_report_and_the_status(monkeypatch, tmp_path, capsys):
    spills = {"stack": 8, "spill_stores": 40, "spill_loads": 24, "registers": 255}
    programs = (blank(resources={"body": spills}), blank(status="failed", detail="too large", case="9 rows"))
    asked = []

    def fake(platform, **options):
        asked.append((platform, options))
        return compile_check.Report(platform, programs if platform == "b200" else programs[:1], {"jax": "1"}, 2.0)

    monkeypatch.setattr(compile_check, "compile_for", fake)
    file = tmp_path / "report.json"
    assert compile_check.main(["--platform", "all", "--every", "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "h200: 1 ok, 0 failed" in out and "b200: 1 ok, 1 failed" in out
    assert "FAILED  product kernel, 9 rows: too large" in out
    assert "spills  product kernel, 64 rows: body: 40 bytes of stores, 24 of loads" in out
    assert sorted(platform for platform, _ in asked) == sorted(compile_check.PLATFORMS)
    assert all(options["every"] and options["compilers"] is None for _, options in asked)
    assert [(one["platform"], one["failed"]) for one in json.loads(file.read_text())] == [
        ("h200", 0),
        ("b200", 1),
        ("rtx_pro_6000", 0),
    ]
    assert compile_check.main(["--platform", "h200", "--platform", "h200"]) == 0
    assert asked[3:] == [("h200", {name: None for name in ("compilers", "ops", "op", "case")} | {"every": False})]


@pytest.mark.parametrize("text", ["a\n b", "x" * 5000])
def test_long_errors_keep_both_ends(text):
    short = compile_programs._short(ValueError(f"first {text} last"))
    assert short.startswith("first") and short.endswith("last")
    assert len(short) <= 1010 and "\n" not in short
