"""Kernel operations over meshes: each device runs the kernel on its own part, and the parts make the whole result.

The kernels are interpreted, in a process with eight virtual devices (`mesh_ops_worker`); `test_meshes` runs models.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ddtree_jax.models.kernel_specs import heads_specs, local_expert_ids, mla_specs
from ddtree_jax.models.sharding import EXPERT, TENSOR, make_mesh
from ddtree_jax.pallas.choice import KernelChoice, Specs
from tests.conftest import compilation_as_here

ROOT = Path(__file__).parents[2]
SECONDS = 900
TOLERANCE = {"plain": 2e-3, "packed": 2e-6, "rest": 2e-6}  # plain weights are bfloat16, and so is what experts give
SPLIT = {"attention.mla.q_b", "attention.mla.o", "mlp.gate_up", "mlp"}


def run(mesh, part):
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.mesh_ops_worker", mesh, part],
        env=os.environ
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        | compilation_as_here(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(mesh, part):
    results = run(mesh, part)
    for name, result in results.items():
        assert result["kernels"] > 0 and result["error"] <= TOLERANCE[part], f"{name} over {mesh}: {result}"
    if part == "rest":
        assert len(results) == 7
        return
    expected = SPLIT | ({"head"} if part == "packed" else {"attention.mla.k_b", "attention.mla.v_b"})
    found = {name.removeprefix("stacks.layers.") for name, result in results.items() if result["split"]}
    assert found == expected and len(results) == len(expected) + 1


@pytest.mark.timeout(SECONDS)
def test_plain_weights():
    check("1x2", "plain")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("mesh", "part"), [("2x2", "plain"), ("1x2", "packed"), ("2x2", "packed"), ("1x2", "rest"), ("2x2", "rest")]
)
def test_every_operation(mesh, part):
    check(mesh, part)


@pytest.mark.timeout(SECONDS)
def test_what_is_unpacked_stays_split():
    results = {name.split(".", 4)[-1]: result for name, result in run("2x2", "unpacked").items()}
    assert all(result["in_place"] and result["exact"] for result in results.values())
    assert all(result["small"] == result["small_plain"] for result in results.values())
    split = {name for name, result in results.items() if result["split"]}
    assert split == (SPLIT - {"mlp"}) | {"head", "mlp.down", "mlp.shared.gate_up", "mlp.shared.down"}
    assert results["attention.mla.o"]["small"] and {result["small"] for result in results.values()} == {True, False}


def test_expert_ids_count_from_each_devices_first_expert():
    ids = jnp.asarray([[0, 5], [3, 7]], jnp.int32)
    mesh = make_mesh(4, 1, devices="abstract")
    local = local_expert_ids(ids, 8, EXPERT, mesh).reshape(4, 2, 2)
    for device in range(4):
        assert (local[device] == ids - 2 * device).all()
    assert local_expert_ids(ids, 8, None, mesh) is ids
    assert local_expert_ids(ids, 8, None, None) is ids


@pytest.mark.parametrize(
    ("heads", "batch", "expected"),
    [(8, 2, (EXPERT, TENSOR)), (8, 3, (None, TENSOR)), (6, 2, (EXPERT, None)), (6, 1, (None, None))],
)
def test_what_does_not_divide_is_whole(heads, batch, expected):
    q = jax.ShapeDtypeStruct((batch, 5, heads, 16), jnp.float32)
    specs = mla_specs(q, make_mesh(2, 4, devices="abstract"))
    own, head = expected
    assert specs.results == specs.operands[0] == P(own, None, head)
    assert specs.operands[1] == P(None, own) and specs.sums == ()
    assert mla_specs(q, None) is None
    # The heads' own matrices are split as they were loaded, so their place is given.
    specs = heads_specs(batch, head, make_mesh(2, 4, devices="abstract"))
    assert specs.results == specs.operands[0] == P(own, None, head) and specs.sums == ()
    assert specs.operands[1] == P(None, None, head) and heads_specs(batch, head, None) is None


def test_a_choice_over_a_mesh_of_one_device():
    choice = KernelChoice(mesh=make_mesh())
    x, weights = jnp.ones((2, 16)), jnp.ones((3, 16, 4))
    specs = Specs((P(None, TENSOR), P(None, TENSOR)), P(), (TENSOR,))
    for own in (None, specs):
        y = choice.run("layer_matmul", x, weights, jnp.int32(1), out_dtype=jnp.float32, specs=own)
        assert (y == 16).all() and y.shape == (2, 4)
    assert hash(choice) == hash(KernelChoice(mesh=make_mesh())) and choice != KernelChoice()
