"""Hundreds of damaged pairs through `load`: `CheckpointError`, or exactly the right parameters, and nothing else."""

import collections
import contextlib
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import CheckpointError, checkpoint
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.models.params import drafter_tensors, target_tensors
from tests.engine.checkpoint_files import decode, write_checkpoint
from tests.engine.conftest import DRAFTER, TARGET
from tests.engine.mutations import NONSENSE, mutate

CASE_SECONDS = 20  # a case takes some hundredths of a second
CASE_MEMORY = 64 * 2**20  # bytes by which one case may raise the peak of the process; both folders have 0.2 MB
# What the shapes of the weights do not depend on: another value is another model, of which no loader can know.
FREE_OF_TARGET = {
    *("num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "index_topk"),
    *("rope_theta", "rms_norm_eps", "max_position_embeddings", "eos_token_ids", "pad_token_id"),
}
FREE_OF_DRAFTER = {
    *("block_size", "mask_token_id", "rope_theta", "rms_norm_eps", "max_position_embeddings", "causal", "windows"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "num_target_layers"),
}
SIZES = (0, 1, 2, 3, 5, 31, 33, 64, 4096, 65_536, 2**31 - 1, 2**31, 2**63)


def target_kind(name: str) -> str:
    """The mixture of published exports: experts NVFP4 of two producers, attention FP8, the rest plain."""
    if ".experts." in name:
        return "nvfp4" if "layers.1." in name else "nvfp4_packed"
    if ".self_attn." in name:
        return "fp8_channel" if "o_proj" in name else "fp8_block"
    return "float32" if ".gate." in name or "shared" in name else "bfloat16"


def drafter_kind(name: str) -> str:
    if ".mlp." in name:
        return "nvfp4"
    return "fp8_tensor" if ".self_attn." in name else "bfloat16"


@dataclasses.dataclass(frozen=True)
class Pair:
    """An undamaged pair on disk and what it holds: name in a plain checkpoint -> weight, float64."""

    root: Path
    target: dict[str, np.ndarray]
    drafter: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The same pair with a target in one file, and in three with an index."""
    rng = np.random.default_rng(3)
    specs = {"target": list(target_tensors(TARGET)), "drafter": list(drafter_tensors(DRAFTER, TARGET.hidden_size))}
    weights = {part: {s.name: rng.standard_normal(s.shape) for s in own} for part, own in specs.items()}
    extra = {
        "model.layers.1.self_attn.k_proj.k_scale": np.ones(1, np.float32),
        "model.layers.3.eh_proj.weight": np.zeros((32, 64), np.float16),
    }
    out = []
    for shards in (1, 3):
        root = tmp_path_factory.mktemp(f"in{shards}")
        target = write_checkpoint(root / "target", weights["target"], target_kind, shards=shards, extra=extra)
        drafter = write_checkpoint(root / "drafter", weights["drafter"], drafter_kind, shards=4 - shards)
        (root / "target" / "config.json").write_text(json.dumps(TARGET.to_hf()))
        (root / "target" / "generation_config.json").write_text('{"eos_token_id": [5, 9], "pad_token_id": 0}')
        (root / "drafter" / "config.json").write_text(json.dumps(DRAFTER.to_hf()))
        out.append(Pair(root, target, drafter))
    return out


class Hang(BaseException):
    """A case ran out of time. No `Exception`: nothing under test may swallow it."""


@contextlib.contextmanager
def guarded(what: str):
    """Ends a case that hangs, in Python or in a system call, and fails one that takes memory.

    pytest-timeout has the process's only interval timer, so a thread sends the signal.
    """

    def stop(number, frame):
        raise Hang(what)

    main = threading.main_thread().ident
    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(CASE_SECONDS, signal.pthread_kill, (main, signal.SIGUSR1))
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # Linux: the peak starts anew from what is held now
    held = peak_memory()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    grown = peak_memory() - held
    assert grown < CASE_MEMORY, f"{what}: {grown} bytes"


def peak_memory() -> int:
    """Most bytes of memory that this process has held."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def weights_of(specs, params) -> dict[str, np.ndarray]:
    """Name in a plain checkpoint -> the weight that the parameters hold, decoded by the tests' own tables."""
    leaves = {path: np.asarray(leaf) for path, leaf in flat_leaves(params).items()}
    specs = list(specs)
    tensors = {name: a for spec in specs for name, a in checkpoint._tensors(spec, leaves, np.float32)}
    return {spec.name: decode(tensors, spec.name) for spec in specs}


def assert_weights(found, expected, what):
    assert found.keys() == expected.keys(), what
    for name, weight in found.items():
        # atol: one step of the subnormal numbers of float32
        np.testing.assert_allclose(weight, expected[name], rtol=1.3e-7, atol=1.5e-45, err_msg=f"{what}: {name}")


def assert_right(engine, target, drafter, what):
    """Parameters are exactly these weights, and configs differ from the original ones in free fields alone."""
    module = engine.target.module()
    specs = target_tensors(engine.target.config, packed=module.packed)
    assert_weights(weights_of(specs, engine.target.params), target, what)
    specs = drafter_tensors(engine.drafter.config, engine.target.config.hidden_size)
    assert_weights(weights_of(specs, engine.drafter.params), drafter, what)
    for found, original, free in (
        (engine.target.config, TARGET, FREE_OF_TARGET),
        (engine.drafter.config, DRAFTER, FREE_OF_DRAFTER),
    ):
        changed = {f.name for f in dataclasses.fields(found) if getattr(found, f.name) != getattr(original, f.name)}
        assert changed <= free, f"{what}: {changed - free}"


@dataclasses.dataclass(frozen=True)
class Damage:
    """What was done to a copy of a pair, and what may come of it.

    Attributes:
      what: for the test's message.
      target, drafter: the only weights that a load may give; None: it must be refused.
      may_refuse: whether `CheckpointError` is a right answer.
    """

    what: str
    target: dict[str, np.ndarray] | None
    drafter: dict[str, np.ndarray] | None
    may_refuse: bool = True


def damage_target_file(pair: Pair, root: Path, seed: int) -> Damage:
    case = mutate(root / "target", pair.target, seed)
    return Damage(case.what, case.weights, pair.drafter, case.may_refuse)


def damage_drafter_file(pair: Pair, root: Path, seed: int) -> Damage:
    case = mutate(root / "drafter", pair.drafter, seed)
    return Damage(case.what, pair.target, case.weights, case.may_refuse)


def _edit(path: Path, rng: random.Random) -> str:
    """One key of a JSON object, nested ones included, is dropped or gets another value."""
    content = json.loads(path.read_text())
    at = content
    nested = [key for key, value in content.items() if isinstance(value, dict)]
    if nested and rng.random() < 0.4:
        at = content[rng.choice(nested)]
    key = rng.choice(sorted(at))
    kind = rng.choice(("drop", "nonsense", "size", "size", "float", "wrapped"))
    if kind == "drop":
        del at[key]
    else:
        values = {"nonsense": NONSENSE, "size": SIZES, "float": (0.5, 1e-30, 1e300), "wrapped": ([at[key]],)}
        at[key] = rng.choice(values[kind])
    path.write_text(json.dumps(content))
    return f"{path.name}: {key} {kind} {str(at.get(key))[:80]}"


def _break_file(path: Path, rng: random.Random) -> str:
    raw = path.read_bytes()
    kind = rng.choice(["flip", "flip", "flip", "cut", "folder", "pipe", "device", "dangling", "text"])
    if kind == "flip":
        changed, at = bytearray(raw), rng.randrange(len(raw))
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        return f"{path.name}: byte {at}"
    path.unlink()
    if kind == "cut":
        path.write_bytes(raw[: rng.randrange(len(raw))])
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("device", "dangling"):
        path.symlink_to("/dev/zero" if kind == "device" else path.with_name("nothing"))
    else:
        path.write_bytes(rng.choice([b"", b"[]", b"null", b"[" * 10**5, raw.decode().encode("utf-16"), b"1" * 6000]))
    return f"{path.name}: {kind}"


def damage_target_config(pair: Pair, root: Path, seed: int) -> Damage:
    rng = random.Random(seed)
    change = _break_file if rng.random() < 0.2 else _edit
    return Damage(change(root / "target" / "config.json", rng), pair.target, pair.drafter)


def damage_generation_config(pair: Pair, root: Path, seed: int) -> Damage:
    rng, path = random.Random(seed), root / "target" / "generation_config.json"
    if rng.random() < 0.3:
        return Damage(_break_file(path, rng), pair.target, pair.drafter)
    good = rng.random() < 0.2
    ids = (
        rng.choice((7, [7], [3, 5], [], None)) if good else rng.choice((*NONSENSE, 61, [5, 61], [5, None], "5", [True]))
    )
    path.write_text(json.dumps({"eos_token_id": ids}))
    return Damage(f"eos_token_id {str(ids)[:80]}", pair.target, pair.drafter, may_refuse=not good)


OTHER_TARGETS = (
    {"hidden_size": 64},
    {"vocab_size": 62},
    {"num_target_layers": 78},
    {"num_target_layers": 2},
    {"target_layer_ids": [0, 3]},
    {"target_layer_ids": [5, 19, 33, 47, 61, 75]},
    {"target_layer_ids": [0]},
    {"target_layer_ids": [0, 0]},
    {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    {"architectures": ["Qwen3ForCausalLM"]},
    *({"mask_token_id": bad} for bad in (None, -1, 61, 154_856, 5, 9, True, 2.0, "60", [60], 10**400)),
)
SECOND_VERSION = (
    {"architectures": ["DFlash2DraftModel"]},
    {"conv_kernel_size": 2, "conv_group_size": 16},
    {"selector_rank": 256, "selector_top_k": 16},
    {"selector_rank": -1},
    {"conv_kernel_size": 10**9, "conv_group_size": "x"},
)


def damage_drafter_config(pair: Pair, root: Path, seed: int) -> Damage:
    rng, path = random.Random(seed), root / "drafter" / "config.json"
    if rng.random() < 0.5:
        change = _break_file if rng.random() < 0.2 else _edit
        return Damage(change(path, rng), pair.target, pair.drafter)
    foreign = rng.random() < 0.6
    changes = rng.choice(OTHER_TARGETS if foreign else SECOND_VERSION)
    refused = foreign or "architectures" in changes
    content = json.loads(path.read_text())
    for key, value in changes.items():
        at = content if key in content else content["dflash_config"]
        at[key] = value
    path.write_text(json.dumps(content))
    return Damage(str(changes)[:80], None if refused else pair.target, None if refused else pair.drafter)


KINDS = {
    **{"target file": (damage_target_file, 240), "drafter file": (damage_drafter_file, 120)},
    **{"target config": (damage_target_config, 200), "generation config": (damage_generation_config, 60)},
    "drafter config": (damage_drafter_config, 160),
}


def test_the_undamaged_pairs_load(pairs):
    for pair in pairs:
        engine = ddtree_jax.load(pair.root / "target", pair.root / "drafter", dtype="float32")
        assert_right(engine, pair.target, pair.drafter, str(pair.root))
        assert engine.target.config == TARGET and engine.drafter.config == DRAFTER
        packed = {".".join(map(str, path[-3:-1])) for path in flat_leaves(engine.target.params) if path[-1] == "codes"}
        assert packed == {"mlp.gate_up", "mlp.down"}


@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_or_without_effect(pairs, tmp_path, kind, part):
    damage, count = KINDS[kind]
    count = count // 3 if part == "some" else count
    outcomes = collections.Counter()
    for seed in range(count):
        pair = pairs[seed % 2]
        root = tmp_path / str(seed)
        shutil.copytree(pair.root, root)
        case = damage(pair, root, seed)
        what = f"{kind}, seed {seed}: {case.what}"
        try:
            with guarded(what):
                engine = ddtree_jax.load(root / "target", root / "drafter", dtype="float32")
        except CheckpointError as error:
            assert case.may_refuse, f"{what}: refused: {error}"
            assert str(root) in str(error) and len(str(error)) < 12_000, what
            outcomes["refused"] += 1
        except BaseException as error:
            error.add_note(what)
            raise
        else:
            assert case.target is not None and case.drafter is not None, f"{what}: not refused"
            assert_right(engine, case.target, case.drafter, what)
            outcomes["loaded"] += 1
        shutil.rmtree(root)
    # Cases that are all refused, or none, would mean that the mutations have lost their teeth.
    assert outcomes["refused"] > count // 3 and outcomes["loaded"] > count // 20, outcomes


@pytest.mark.parametrize(("ids", "expected"), [(7, (7,)), ([3, 5], (3, 5)), ([], (5, 9)), (None, (5, 9)), (0, (0,))])
def test_end_tokens_are_those_of_the_generation_config_where_it_names_any(pairs, tmp_path, ids, expected):
    shutil.copytree(pairs[0].root, tmp_path / "pair")
    (tmp_path / "pair" / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert ddtree_jax.load(tmp_path / "pair" / "target").stop_token_ids == expected


def test_the_guard_ends_a_case_that_hangs(tmp_path, monkeypatch):
    """Negative control: opening a pipe that nobody writes to."""
    monkeypatch.setattr("tests.engine.test_load_fuzz.CASE_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Hang), guarded("pipe"):
        (tmp_path / "pipe").read_bytes()


def test_the_guard_fails_a_case_that_takes_memory():
    with pytest.raises(AssertionError, match="greedy"), guarded("greedy"):
        np.ones((peak_memory() + CASE_MEMORY) // 8)
