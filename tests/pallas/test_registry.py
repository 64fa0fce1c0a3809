"""The table of operations and cases, and what may be chosen from it."""

import functools
import pathlib

import jax
import pytest

from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import H200
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.cases.registry import Expected, load_registry
from ddtree_jax.pallas.dispatch import REFERENCE

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def toys():
    return load_registry(HERE / "toy_ops.py")


def test_the_package_has_cases_of_its_operations_that_can_be_traced():
    registry = load_registry()
    assert registry.ops is OPS
    assert {case.op for case in registry.cases} == set(OPS)
    names = [(case.op, case.name) for case in registry.cases]
    assert len(names) == len(set(names))
    for case in registry.cases:
        shapes = jax.eval_shape(case.make, jax.random.key(0))
        assert isinstance(shapes, tuple) and case.traffic > 0 and case.flops >= 0
        assert set(case.rotate) | set(case.carries.values()) <= set(range(len(shapes)))
        assert case.exact is not None or case.check is not None, case.name


def test_selection_by_operation_and_name(toys):
    assert [case.name for case in toys.select("toy_product").cases] == ["4 rows", "8 rows"]
    assert [case.name for case in toys.select(case="8").cases] == ["8 rows"]
    with pytest.raises(ValueError, match="op: got 'other'; allowed: toy_product, toy_row"):
        toys.select("other")
    with pytest.raises(ValueError, match="no name of a case has 'seven'"):
        toys.select(case="seven")


def test_pairs_have_the_reference_last_and_only_when_asked(toys):
    (case,) = toys.select(case="4 rows").cases
    toys = toys.select(case="4 rows")
    assert list(toys.pairs()) == [(case, "fast"), (case, "hopper_only")]
    assert list(toys.pairs(reference=True))[-1] == (case, "reference")


def test_a_file_that_does_not_fit_together(tmp_path):
    head = f"import sys\nsys.path.insert(0, {str(HERE)!r})\nfrom toy_ops import OPS, CASES\n"
    file = tmp_path / "ops.py"
    file.write_text(head + "OPS = {'toy_product': OPS['toy_product']}\n")
    with pytest.raises(ValueError, match="'a cache of 10': its operation 'toy_row' is not in the table"):
        load_registry(file)
    file.write_text(head + "EXPECTED = {('toy_row', 'fast'): None}\n")
    with pytest.raises(ValueError, match="no implementation 'fast' of 'toy_row'"):
        load_registry(file)


@pytest.mark.parametrize("text", [None, "", "1 /", "OPS = {}", "raise SystemError('no')"])
def test_a_file_that_gives_no_operations(tmp_path, text):
    file = tmp_path / "ops.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="does not give OPS and CASES"):
        load_registry(file)


def test_expectations_of_a_case_module_are_by_implementation(monkeypatch):
    from ddtree_jax.pallas.cases import base

    op = load_registry(HERE / "toy_ops.py").ops["toy_product"]
    monkeypatch.setitem(OPS, "toy_product", op)
    case = Case("toy_product", "x", lambda key: (), {}, 1, 1)
    expected = Expected(code={"h200": ("wgmma",)})
    # Any module of the package stands for one.
    monkeypatch.setattr(base, "CASES", (case,), raising=False)
    monkeypatch.setattr(base, "EXPECTED", {"fast": expected, "of_another_operation": Expected()}, raising=False)
    registry = load_registry()
    assert case in registry.cases
    assert registry.expected["toy_product", "fast"] is expected
    assert not any(name == "of_another_operation" for _, name in registry.expected)


@pytest.mark.parametrize("rarely", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_hopper_a_kernel_serves_every_case_but_these(rarely):
    """So that what a test skips where no kernel serves cannot hide one. rarely: the cases that are rarely compiled."""
    registry = load_registry()
    cases = [case for case in registry.cases if case.compile_slow == rarely]
    assert cases
    for case in cases:
        op, shapes = registry.ops[case.op], jax.eval_shape(case.make, jax.random.key(0))

        def serves(name, op=op, case=case, shapes=shapes):
            run = functools.partial(op, implementation=name, platform=H200, **case.static)
            try:
                jax.eval_shape(run, *shapes)
            except NotImplementedError:
                return False
            return True

        served = any(serves(name) for name in op.names(H200) if name != REFERENCE)
        left = case.op in ("nvfp4_w4a4_matmul", "vocab_argmax") or "converted by hardware" in case.name
        many = case.op == "nvfp4_matmul" and "256 rows, shifted" in case.name  # Triton's are up to 128
        assert served != (left or many), case.name
