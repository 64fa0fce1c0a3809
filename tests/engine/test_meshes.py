"""Meshes: the same tokens and the same trees as on one device, parameters really split, nothing compiled twice."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import ddtree_jax
from ddtree_jax.models import load_drafter, load_target
from ddtree_jax.models.sharding import make_mesh
from tests.conftest import compilation_as_here
from tests.engine.mesh_worker import write_pair

ROOT = Path(__file__).parents[2]
GREEDY = (["ddtree", 6, 0.0], ["dflash", 0, 0.0], ["none", 0, 0.0])
SAMPLED = (["ddtree", 6, 0.8], ["none", 0, 0.8])
SECONDS = 1500


@pytest.fixture(scope="module")
def run(tmp_path_factory, request):
    """Runs cases in a process with eight virtual devices."""
    folder = tmp_path_factory.mktemp("pairs")

    def run(cases):
        message = {"folder": str(folder), "cache": str(request.config.cache.mkdir("jax-programs")), "cases": cases}
        flags = "--xla_force_host_platform_device_count=8"
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine.mesh_worker", json.dumps(message)],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | compilation_as_here(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        answer = json.loads(done.stdout.splitlines()[-1])
        assert answer["devices"] == 8
        return answer["results"]

    return run


def cases(target, meshes, batch, runs, **more):
    return [{"target": target, "mesh": mesh, "batch": batch, "runs": list(runs), **more} for mesh in meshes]


def check(asked, results, replicated=()):
    """Every case gives what the first, on one device, gives; and its parameters are split as the headers said."""
    alone = results[0]
    assert asked[0]["mesh"] == "none"
    for case, result in zip(asked, results, strict=True):
        label = f"{case['target']} over {case['mesh']}, batch {case['batch']}"
        for which, found, expected in zip(case["runs"], result["runs"], alone["runs"], strict=True):
            assert found == expected, f"{label}: {which}"
            assert all(len(tokens) == 8 for tokens in found["tokens"])
            # A round of plain decoding has a tree of one node.
            assert found["trees"] and (which[0] == "none") == all(len(tree[1]) == 1 for tree in found["trees"])
        assert result["programs"] >= 4  # that count is no constant
        assert result["again"] == 0, f"{label}: {result['again']} programs compiled on the second call"
        for part in ("loop", "grammar", "serve"):
            assert result.get(part) == alone.get(part), f"{label}: {part}"
        for part in ("target", "drafter"):
            held = result[part]["held"]
            assert set(held) == {result[part]["said"]}, f"{label}: {part}: {held}, {result[part]['said']} expected"
            whole = case["mesh"] == "none" or (part, case["mesh"]) in replicated
            assert (held[0] == result[part]["whole"]) == whole, f"{label}: {part}"
    greedy = {
        json.dumps(run["tokens"]) for run, which in zip(alone["runs"], asked[0]["runs"], strict=True) if not which[2]
    }
    assert len(greedy) <= 1, f"{asked[0]['target']}: algorithms differ"
    if "loop" in alone:
        assert alone["loop"] == alone["runs"][0]["tokens"]


# Over EXPERT alone nothing of the drafter is split, and neither over eight ways: it has two heads and three groups.
DRAFTER_WHOLE = (
    ("drafter", "8x1"),
    ("drafter", "2x4"),
    ("drafter", "1x8"),
    ("drafter", "swapped"),
    ("drafter", "tensor alone"),
)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_grammars_on_meshes(run):
    asked = cases("few plain", ["none", "2x4", "1x8"], 2, GREEDY[:1], grammar=True)
    results = run(asked)
    check(asked, results, DRAFTER_WHOLE)
    found = results[0]["grammar"]
    assert found["host"] == found["table"] and len(found["host"][0]) >= 5
    assert found["host"][1] == results[0]["runs"][0]["tokens"][1] or 0 in found["host"][1]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_slots_of_a_server_on_meshes(run):
    asked = cases("few plain", ["none", "2x4", "1x8"], 2, GREEDY[:1], serve=True)
    results = run(asked)
    check(asked, results, DRAFTER_WHOLE)
    assert len({tuple(tokens) for tokens in results[0]["serve"]}) >= 6


@pytest.mark.slow
def test_a_packed_target_with_many_experts(run):
    """The fast representative: experts over both axes, a vocabulary that divides over none, a batch that is split."""
    asked = cases("many packed", ("none", "2x4"), 2, GREEDY[:1])
    results = run(asked)
    check(asked, results, DRAFTER_WHOLE)
    assert max(results[0]["runs"][0]["lengths"]) > 1  # a tree of which nothing is accepted would be no test


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("target", ["few plain", "few packed", "many plain", "many packed", "all packed", "odd packed"])
def test_every_mesh_gives_the_same_tokens_and_trees(run, target):
    asked = cases(target, ("none", "2x4", "1x8", "8x1"), 8, GREEDY)
    replicated = DRAFTER_WHOLE if target != "odd packed" else (*DRAFTER_WHOLE, ("target", "8x1"))
    check(asked, run(asked), replicated)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("target", ["few packed", "many plain", "many packed"])
def test_batches_that_the_expert_axis_does_not_divide(run, target, batch):
    asked = cases(target, ("none", "2x4", "8x1"), batch, (*GREEDY[:1], *SAMPLED), loop=True)
    check(asked, run(asked), DRAFTER_WHOLE)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_axes_may_be_fewer_or_in_another_order(run):
    asked = cases("many packed", ("none", "tensor alone", "swapped"), 2, GREEDY[:1])
    check(asked, run(asked), DRAFTER_WHOLE)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("target", ["few plain", "few packed", "many plain", "many packed", "all packed", "odd packed"])
def test_the_kernel_table_on_meshes(run, target):
    """Every operation by its reference, on each device's own part: the tokens and trees of one device in plain JAX."""
    asked = cases(target, ("none",), 2, GREEDY[:1])
    asked += cases(target, ("2x4", "1x2", "2x1"), 2, GREEDY[:1], kernels="packed", gathers=True)
    if target in ("all packed", "odd packed"):
        asked += cases(target, ("2x4", "1x2"), 2, GREEDY[:1], kernels="unpacked", gathers=True)
    results = run(asked)
    whole = [("drafter", "2x1")] + [("target", "2x1")] * (target == "odd packed")
    check(asked, results, (*DRAFTER_WHOLE, *whole))
    for case, result in zip(asked[1:], results[1:], strict=True):
        weights, moved = (result["gathers"][kind] for kind in ("weights", "gathered"))
        # Only activations, which are smaller than any large weight, go from device to device.
        large = [size for size in weights if size > 4096]
        assert max(moved, default=0) < min(large, default=math.inf), case["mesh"]
        assert (weights and moved) or case["mesh"] == "2x1", case["mesh"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_pair(root, "few plain")
    return root


def one_device(*axes):
    return Mesh(np.array(jax.devices()[:1]).reshape([1] * len(axes)), axes)


WRONG = {
    "foreign axis": lambda: one_device("expert", "model"),
    "foreign axes": lambda: one_device("x", "y"),
    "one foreign axis": lambda: one_device("data"),
    "no axes": lambda: Mesh(np.array(jax.devices()[0]), ()),
    "no mesh": lambda: (1, 1),
    "text": lambda: "1x1",
    "devices": jax.devices,
    "without devices": lambda: AbstractMesh((1, 1), ("expert", "tensor")),
    "many without devices": lambda: make_mesh(64, 8, devices="abstract"),
    "foreign without devices": lambda: AbstractMesh((2,), ("x",)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mesh_is_refused(folders, wrong):
    mesh = WRONG[wrong]()
    target = load_target(folders / "target")
    for attempt in (
        lambda: ddtree_jax.load(folders / "target", folders / "drafter", mesh=mesh),
        lambda: load_target(folders / "target", mesh=mesh),
        lambda: load_drafter(folders / "drafter", target, mesh=mesh),
    ):
        with pytest.raises(ValueError, match="^mesh: got .*allowed"):
            attempt()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (10**6, 10**6), (0, 1), (1, -1), (True, 1), (1.0, 1), ("1", 1)])
def test_a_mesh_that_cannot_be_made_is_refused(sizes):
    with pytest.raises(ValueError, match="^(mesh|expert|tensor): got .*allowed"):
        make_mesh(*sizes)


def test_an_abstract_mesh_has_a_largest_size():
    assert make_mesh(1024, 1024, devices="abstract").size == 2**20
    with pytest.raises(ValueError, match="^mesh: got .*allowed"):
        make_mesh(1024, 1025, devices="abstract")


def test_a_drafter_lies_on_the_mesh_of_its_target(folders):
    alone, split = load_target(folders / "target"), load_target(folders / "target", mesh=make_mesh())
    assert load_drafter(folders / "drafter", split).mesh == split.mesh == make_mesh()
    assert load_drafter(folders / "drafter", split, mesh=make_mesh()).mesh == split.mesh
    assert load_drafter(folders / "drafter", alone).mesh is None
    for target, mesh in ((alone, make_mesh()), (split, one_device("tensor"))):
        with pytest.raises(ValueError, match="^mesh: got .*the target's"):
            load_drafter(folders / "drafter", target, mesh=mesh)


@pytest.mark.slow
def test_a_mesh_of_one_device_changes_nothing(folders):
    plain = ddtree_jax.load(folders / "target", folders / "drafter")
    split = ddtree_jax.load(folders / "target", folders / "drafter", mesh=make_mesh())
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    one, other = (ddtree_jax.generate(engine, prompts, 12, "ddtree", 6) for engine in (plain, split))
    assert [r.token_ids for r in one] == [r.token_ids for r in other]
