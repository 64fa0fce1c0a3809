"""Quantising a target folder: what changes, what stays byte for byte, and what an interruption leaves behind."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from ddtree_jax import CheckpointError, quantise
from ddtree_jax.converted import convert
from ddtree_jax.models import load_target, target_logits
from ddtree_jax.models.params import mtp_tensors, target_tensors
from ddtree_jax.quantise import QuantiseReport, quantise_target
from tests.engine.checkpoint_files import BF16, E2M1, E4M3, decode, random_weights, read_file, write_checkpoint
from tests.engine.conftest import TARGET

CONFIG = dataclasses.replace(TARGET, moe_intermediate_size=32)
NARROW = dataclasses.replace(TARGET, moe_intermediate_size=24, n_shared_experts=2)
IDS = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, 17))
EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")
NUM_EXPERT_WEIGHTS = 2 * CONFIG.n_routed_experts * 3


def attention_fp8(name):
    return "fp8_block" if "self_attn" in name and name.endswith("proj.weight") else "bfloat16"


def write_target(folder, config, weights, kind="bfloat16", **options):
    stored = write_checkpoint(folder, weights, kind, activation_scales=False, **options)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return stored


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Attention FP8, the rest bfloat16, an MTP layer, in three files; and the other files of a published folder."""
    folder = tmp_path_factory.mktemp("source") / "target"
    extra = {name: np.zeros(shape, BF16) for name, shape in mtp_tensors(CONFIG)}
    write_target(folder, CONFIG, random_weights(CONFIG, seed=0), attention_fp8, shards=3, extra=extra)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 11]}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def quantised(source):
    folder = source.with_name("quantised")
    return folder, quantise_target(source, folder)


def tensors_of(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in read_file(path).items()}


def same_bytes(one, other):
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def snapshot(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_experts_are_packed_and_everything_else_is_the_same_byte_for_byte(source, quantised):
    folder, report = quantised
    before, after = tensors_of(source), tensors_of(folder)
    expected = set()
    for name, tensor in before.items():
        if "layers.3." in name:  # the MTP layer
            continue
        if not EXPERT.fullmatch(name):
            assert same_bytes(tensor, after[name]), name
            expected.add(name)
            continue
        rows, columns = tensor.shape
        codes, scales, factor = (after[f"{name}{suffix}"] for suffix in ("", "_scale", "_scale_2"))
        assert (codes.dtype, codes.shape) == (np.uint8, (rows, columns // 2))
        assert (scales.dtype, scales.shape) == (E4M3, (rows, columns // 16))
        assert (factor.dtype, factor.shape) == (np.float32, ())
        expected |= {name, f"{name}_scale", f"{name}_scale_2"}
        if "gate_proj" in name:
            assert factor == after[f"{name.replace('gate', 'up')}_scale_2"], "an engine with a fused kernel needs one"
    assert set(after) == expected
    assert report.num_quantised == NUM_EXPERT_WEIGHTS and report.widened_from is None
    assert report.num_copied == len(expected) - 3 * NUM_EXPERT_WEIGHTS
    assert report.bytes_after == sum(tensor.nbytes for tensor in after.values())
    assert report.bytes_before == sum(t.nbytes for name, t in before.items() if "layers.3." not in name)


def test_the_reported_error_is_the_error(source, quantised):
    folder, report = quantised
    before, after = tensors_of(source), tensors_of(folder)
    names = [name for name in before if EXPERT.fullmatch(name) and "layers.3." not in name]
    exact = {name: before[name].astype(np.float64) for name in names}
    lost = sum(np.square(decode(after, name) - exact[name]).sum() for name in names)
    assert report.relative_error == pytest.approx((lost / sum(np.square(w).sum() for w in exact.values())) ** 0.5)
    assert 0.03 < report.relative_error < 0.11  # four bits of normally distributed weights


def test_the_other_files_come_along(source, quantised):
    folder, _ = quantised
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert load_target(folder).config == load_target(source).config
    assert load_target(folder).config.eos_token_ids == (7, 11)
    written, original = (json.loads((f / "config.json").read_text()) for f in (folder, source))
    assert {key for key in written if key not in original} == {"quantization_config"}
    assert written["quantization_config"]["quant_algo"] == "NVFP4"
    assert not list(folder.glob("*partial*")) and not list(folder.parent.glob("*partial*"))


@pytest.mark.slow
def test_logits_stay_close_and_are_those_of_the_decoded_weights(source, quantised, tmp_path):
    folder, _ = quantised
    tensors = tensors_of(folder)
    decoded = {spec.name: decode(tensors, spec.name) for spec in target_tensors(CONFIG)}
    write_target(tmp_path / "decoded", CONFIG, decoded, "float32")
    original, found, exact = (
        np.asarray(target_logits(load_target(f, dtype="float32"), IDS)) for f in (source, folder, tmp_path / "decoded")
    )
    assert np.abs(found - exact).max() <= 2e-4
    error = np.sqrt(np.square(found - original).mean() / np.square(original).mean())
    assert 0.001 < error < 0.2


def exact_experts(config, largest, seed):
    """Weights that NVFP4 holds exactly: every block has a code of 6, and the largest block scale is `largest`."""
    rng = np.random.default_rng(seed)
    out = random_weights(config, seed)
    for name, weight in out.items():
        if EXPERT.fullmatch(name):
            rows, columns = weight.shape
            codes = rng.integers(0, 16, (rows, columns))
            codes[:, ::8] = np.where(rng.random((rows, -(-columns // 8))) < 0.5, 7, 15)
            scales = rng.choice([largest, largest / 2, largest / 4], (rows, -(-columns // 16)))
            scales[0, 0] = largest
            out[name] = E2M1[codes] * np.repeat(scales, 16, axis=1)[:, :columns] * 2.0**-12
    return out


@pytest.mark.parametrize(("search", "largest"), [(False, 448.0), (True, 256.0)])
def test_experts_of_an_odd_width_are_widened_without_effect(tmp_path, search, largest):
    weights = exact_experts(NARROW, largest, 3)
    stored = write_target(tmp_path / "narrow", NARROW, weights)
    report = quantise_target(tmp_path / "narrow", tmp_path / "wide", search=search)
    assert report.widened_from == 24 and report.relative_error == 0.0 and "widened from 24" in report.summary()
    wide = load_target(tmp_path / "wide", dtype="float32")
    assert wide.config == dataclasses.replace(NARROW, moe_intermediate_size=32)
    tensors = tensors_of(tmp_path / "wide")
    for spec in target_tensors(wide.config):
        found, original = decode(tensors, spec.name), stored[spec.name]
        part = tuple(slice(size) for size in original.shape)
        np.testing.assert_array_equal(found[part], original, err_msg=spec.name)
        found[part] = 0
        assert not found.any(), spec.name
    if search:  # the same arrays in both cases but for a power of two: once is enough
        return
    logits = [np.asarray(target_logits(t, IDS)) for t in (load_target(tmp_path / "narrow", dtype="float32"), wide)]
    assert np.abs(logits[0]).max() > 0.5
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=2e-5 * np.abs(logits[0]).max())


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4_packed"])
def test_experts_that_are_packed_already_are_copied(tmp_path, kind):
    def rule(name):
        return kind if ".experts." in name else "bfloat16"

    write_target(tmp_path / "source", CONFIG, random_weights(CONFIG, seed=0), rule)
    report = quantise_target(tmp_path / "source", tmp_path / "out")
    assert (report.num_quantised, report.relative_error) == (0, 0.0)
    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys() and all(same_bytes(before[name], after[name]) for name in before)
    assert report.bytes_before == report.bytes_after and report.num_copied == len(after)


def test_a_search_lowers_the_error(source, quantised, tmp_path):
    plain = quantise_target(source, tmp_path / "plain", search=False)
    assert quantised[1].relative_error < 0.97 * plain.relative_error
    assert dataclasses.replace(plain, relative_error=0) == dataclasses.replace(quantised[1], relative_error=0)


def test_shards_hold_the_same_tensors(source, quantised, tmp_path):
    quantise_target(source, tmp_path / "out", max_shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    one, other = tensors_of(quantised[0]), tensors_of(tmp_path / "out")
    assert one.keys() == other.keys() and all(same_bytes(one[name], other[name]) for name in one)
    assert load_target(tmp_path / "out").config == load_target(source).config


def test_weights_that_are_all_zero_or_next_to_nothing(tmp_path):
    """No scale of zero, and no multiplier that is no normal number."""
    weights = random_weights(CONFIG, seed=0)
    for name in weights:
        if "layers.1.mlp.experts." in name:
            weights[name] *= 0.0 if "experts.0." in name else 1e-37
    stored = write_target(tmp_path / "source", CONFIG, weights)
    for search in (False, True):
        quantise_target(tmp_path / "source", tmp_path / f"out{search}", search=search)
        tensors = tensors_of(tmp_path / f"out{search}")
        load_target(tmp_path / f"out{search}")  # its values are checked
        louder = {name: t * np.float32(2**40) if name.endswith("_scale_2") else t for name, t in tensors.items()}
        for name in filter(EXPERT.fullmatch, stored):  # in a range that the tests' decoder takes
            error = np.abs(decode(louder, name) - stored[name] * 2**40).max()
            assert error <= np.abs(stored[name]).max() * 2**40 / 4, name


def test_progress_is_said(source, tmp_path):
    lines = []
    quantise_target(source, tmp_path / "out", progress=lines.append)
    total = sum(1 for _ in target_tensors(CONFIG))
    assert len(lines) == total // 256
    report = QuantiseReport(24, 40, 2_000_000, 1_000_000, 0.0951, None)
    assert report.summary() == "24 expert weights to NVFP4 (relative error 0.0951), 40 tensors copied, 2.0 MB to 1.0 MB"


def test_an_output_that_exists_is_left_alone(source, tmp_path):
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "notes").write_text("mine")
    file.write_text("mine too")
    for output in (full, file, source):
        before = snapshot(output) if output.is_dir() else output.read_bytes()
        with pytest.raises(ValueError, match=r"^output: .* exists"):
            quantise_target(source, output)
        assert (snapshot(output) if output.is_dir() else output.read_bytes()) == before
        assert not list(output.parent.glob("*.partial*"))
    (tmp_path / "taken.partial").write_text("mine as well")
    quantise_target(source, tmp_path / "taken")
    assert (tmp_path / "taken.partial").read_text() == "mine as well"


def test_an_empty_folder_and_missing_parents_will_do(source, quantised, tmp_path):
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        quantise_target(str(source), str(output))
        assert snapshot(output) == snapshot(quantised[0])


class Interruption(BaseException):
    pass


@pytest.mark.parametrize("where", ["quantise", "write_json", "copyfile"])
def test_an_interrupted_run_leaves_nothing_that_looks_whole(source, quantised, tmp_path, monkeypatch, where):
    place = {"quantise": quantise, "write_json": quantise, "copyfile": quantise.shutil}[where]
    original, calls = getattr(place, where), []

    def fail(*args, **kwargs):
        calls.append(args)
        if where != "quantise" or len(calls) == 15:
            raise Interruption
        return original(*args, **kwargs)

    output = tmp_path / "out"
    before = snapshot(source)
    with monkeypatch.context() as patch:
        patch.setattr(place, where, fail)
        with pytest.raises(Interruption):
            quantise_target(source, output, max_shard_bytes=20_000)
    assert calls and snapshot(source) == before and not list(tmp_path.iterdir())
    quantise_target(source, output)
    assert snapshot(output) == snapshot(quantised[0])


def test_a_folder_under_its_temporary_name_never_loads(quantised, tmp_path):
    """What a killed run leaves, even one that was killed at the rename."""
    shutil.copytree(quantised[0], tmp_path / "out.partial-0123abcd")
    with pytest.raises(CheckpointError, match="unfinished"):
        load_target(tmp_path / "out.partial-0123abcd")


def test_a_converted_source_is_refused(source, tmp_path):
    """It has no HF tensors: without the check the output would be an empty checkpoint."""
    convert(source, None, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="converted folder"):
        quantise_target(tmp_path / "converted", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def damaged(folder, change):
    weights = random_weights(CONFIG, seed=0)
    change(weights)
    write_target(folder, CONFIG, weights)
    return folder


def test_a_bad_source_is_refused(tmp_path):
    def not_finite(weights):
        weights["model.layers.2.mlp.experts.3.up_proj.weight"][0, 0] = np.nan

    def missing(weights):
        del weights["model.layers.2.mlp.experts.3.up_proj.weight"]

    foreign = damaged(tmp_path / "foreign", lambda weights: None)
    (foreign / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    cut = damaged(tmp_path / "cut", lambda weights: None)
    with open(cut / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    sources = {
        "no such folder": tmp_path / "nowhere",
        "model_type": foreign,
        "truncated": cut,
        "missing": damaged(tmp_path / "missing", missing),
        "NaN": damaged(tmp_path / "nan", not_finite),
    }
    for message, folder in sources.items():
        with pytest.raises(CheckpointError, match=message):
            quantise_target(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
