"""Memory that a pair needs: told from headers, equal to what is then taken, and refused before anything is taken."""

import dataclasses
import types

import jax
import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import CheckpointError, capacity
from ddtree_jax.capacity import Capacity, Need, estimate
from ddtree_jax.engine import open_pair
from ddtree_jax.models.folders import describe_target
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.models.params import packed_kernels
from ddtree_jax.models.sharding import make_mesh


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", ["demo", "demo-nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_what_the_shipped_pair_takes(name, dtype):
    pair = open_pair(name, dtype=dtype)
    needs = {need.what: need for need in estimate(pair.target, pair.drafter, context=192, batch=3).needs}
    engine = ddtree_jax.load(name, dtype=dtype)
    taken = {
        "target weights": num_bytes(list(flat_leaves(engine.target.params).values())),
        "drafter weights": num_bytes(list(flat_leaves(engine.drafter.params).values())),
        "target cache, 3 x 192 tokens": num_bytes(engine.target.module().empty_cache(3, 192).rows),
        "drafter cache, 3 x 192 tokens": num_bytes(engine.drafter.module().empty_cache(3, 192).rows),
    }
    lengths = 3 * 4  # int32 of each sequence
    for what, total in taken.items():
        assert needs.pop(what).total == total + (lengths if "cache" in what else 0), what
    assert not needs


def test_weights_that_stay_packed_take_less():
    plain, packed = (
        estimate(open_pair(name).target, None, context=1).needs[0].total for name in ("demo", "demo-nvfp4")
    )
    assert packed < 0.7 * plain


@pytest.mark.parametrize("sizes", [None, (2, 4)])
def test_small_linear_layers_count_as_plain_on_kernels(sizes):
    """All that is packed here is small, and unpacked: see `models.kernels`. Of experts nothing is; routers become three
    terms of two bytes.
    """
    mesh = None if sizes is None else make_mesh(*sizes, devices="abstract")
    shapes = {"q_lora_rank": 64, "moe_intermediate_size": 64}  # whole groups of scales
    config = dataclasses.replace(open_pair("demo").target.config, **shapes)
    all_packed, linears, experts = (
        describe_target(config, mesh=mesh, packed=packed_kernels(config, is_packed))
        for is_packed in (lambda name: True, lambda name: ".experts." not in name, lambda name: ".experts." in name)
    )
    plain = describe_target(config, mesh=mesh)

    def need(target, kernels):
        return estimate(target, None, context=1, kernels=kernels).needs[0]

    assert need(linears, False).per_device < need(linears, True).per_device
    routers = [leaf for path, leaf in plain.leaves.items() if path[-1] == "router"]
    more = sum(2 * router.size for router in routers)
    for packed, expected in ((linears, plain), (all_packed, experts)):
        here, without = need(expected, True), need(expected, False)
        assert need(packed, True) == here
        assert (here.total - without.total, here.per_device - without.per_device) == (more, more) and more > 0


@pytest.mark.parametrize(("expert", "tensor"), [(2, 1), (1, 4), (2, 4), (16, 1)])
def test_a_mesh_that_is_not_here_spreads_the_pair(expert, tensor):
    mesh = make_mesh(expert, tensor, devices="abstract")
    alone, pair = open_pair("demo-nvfp4"), open_pair("demo-nvfp4", mesh=mesh)
    whole = estimate(alone.target, alone.drafter, context=64, batch=expert)
    spread = estimate(pair.target, pair.drafter, context=64, batch=expert)
    assert [n.total for n in spread.needs] == [n.total for n in whole.needs]
    assert all(need.per_device == need.total for need in whole.needs)
    weights, _, *caches = spread.needs
    assert weights.total / (expert * tensor) < weights.per_device < weights.total
    assert all(need.per_device == need.total // expert for need in caches)
    odd = estimate(pair.target, pair.drafter, context=64, batch=expert + 1).needs[2:]
    assert all((need.per_device == need.total) == (expert > 1 or tensor > 1) for need in odd)
    assert spread.available is None and spread.fits and spread.num_devices == expert * tensor


def test_absurd_contexts_have_an_estimate():
    pair = open_pair("demo")
    small, huge = (estimate(pair.target, pair.drafter, context=n, batch=n) for n in (2**10, 2**31 - 1))
    assert huge.needs[2].total > small.needs[2].total * 2**41


class WasRead(Exception):
    pass


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Any attempt to place weights ends here."""

    def refuse(*args, **kwargs):
        raise WasRead

    monkeypatch.setattr("ddtree_jax.models.folders.load_leaves", refuse)


def needed():
    pair = open_pair("demo")
    return estimate(pair.target, pair.drafter, context=capacity.CHECKED_CONTEXT).needed


def test_what_does_not_fit_is_refused_before_any_array_exists(monkeypatch, nothing_is_read):
    need = needed()
    for free in (0, 10**6, need, int(need / capacity.HEADROOM) - 1):
        monkeypatch.setattr(capacity, "host_memory_free", lambda free=free: free)
        lines = []
        with pytest.raises(CheckpointError, match=r"^demo: needs 0\.\d\d GB of host memory, of which .*mesh=") as error:
            ddtree_jax.load("demo", progress=lines.append)
        assert lines[0].startswith("memory needed") and lines[-1].endswith("does not fit")
        assert "\n" not in str(error.value)
    monkeypatch.setattr(capacity, "host_memory_free", lambda: int(need / capacity.HEADROOM) + 1)
    with pytest.raises(WasRead):
        ddtree_jax.load("demo")


def test_a_load_that_fits_shows_the_table_first(monkeypatch, nothing_is_read):
    lines = []
    with pytest.raises(WasRead):
        ddtree_jax.load("demo", progress=lines.append)
    assert lines[0].startswith("memory needed") and "fits" in lines[6] and lines[7].startswith("loading target")


def device(platform="gpu", **stats):
    return types.SimpleNamespace(platform=platform, memory_stats=lambda: stats or None)


def test_free_memory_is_that_of_the_fullest_device(monkeypatch):
    devices = [
        device(bytes_limit=100, bytes_in_use=70),
        device(bytes_limit=100, bytes_in_use=20),
        device(bytes_limit=50),
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    mesh = types.SimpleNamespace(devices=np.array(devices[1:] + [device(bytes_limit=1)], object))  # one elsewhere
    assert capacity.free_memory(mesh) == (50, False)
    assert capacity.free_memory(None) == (30, False)
    monkeypatch.setattr(jax, "local_devices", lambda: [device()])
    assert capacity.free_memory(None) == (None, False)
    monkeypatch.setattr(jax, "local_devices", lambda: [device("cpu")])
    monkeypatch.setattr(capacity, "host_memory_free", lambda: 123)
    assert capacity.free_memory(None) == (123, True)
    with pytest.raises(ValueError, match="(?s)^mesh: got .*no device of process 0; allowed"):
        capacity.free_memory(mesh)


def test_host_memory_is_found_without_meminfo(monkeypatch):
    with_it = capacity.host_memory_free()

    def refuse(*args, **kwargs):
        raise OSError

    monkeypatch.setattr(capacity.Path, "read_text", refuse)
    without = capacity.host_memory_free()
    assert 2**26 < without < 2 * with_it + 2**33 and with_it > 2**26


def test_devices_that_share_memory_need_it_together():
    needs = (Need("weights", 80, 30), Need("cache", 20, 10))
    apart, together = (Capacity(needs, 4, 100, sharing) for sharing in (0, 4))
    assert (apart.needed, apart.fits, together.needed, together.fits) == (40, True, 160, False)
    assert Capacity(needs, 4, None, 4).fits and Capacity(needs, 4, None, 4).require("x") is None
    with pytest.raises(CheckpointError, match="^x: needs 0.00 GB of host memory"):
        together.require("x")
    assert Capacity(needs, 1, 42, 0).fits is False  # 95 % of 42 may be used


def test_the_table():
    needs = (Need("target weights", 8 * 10**9, 3 * 10**9), Need("target cache, 1 x 4096 tokens", 10**9, 10**9))
    lines = Capacity(needs, 4, 5 * 10**9, 0).table().splitlines()
    assert [line.split() for line in lines] == [
        "memory needed in all a device".split(),
        "target weights 8.00 GB 3.00 GB".split(),
        "target cache, 1 x 4096 tokens 1.00 GB 1.00 GB".split(),
        "sum 9.00 GB 4.00 GB".split(),
        "each of 4 device(s): 5.00 GB free, 4.00 GB needed: fits".split(),
    ]
    assert Capacity(needs, 4, 10**9, 4).table().endswith("host memory: 1.00 GB free, 16.00 GB needed: does not fit")
    assert Capacity(needs, 4, None, 0).table().endswith("available: unknown (each of 4 device(s))")
