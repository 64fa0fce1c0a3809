"""Every encoding against its definition in float64, mixes of them, and every way a weight can be refused."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from ddtree_jax import CheckpointError
from ddtree_jax.encodings import Encoding, all_finite, find, left_out
from ddtree_jax.models import quant
from ddtree_jax.safetensors_files import CheckpointReader, read_header, write_safetensors
from tests.engine.checkpoint_files import (
    BF16,
    E4M3,
    KINDS,
    NVFP4_KINDS,
    PLAIN_KINDS,
    decode,
    encode,
    read_file,
    write_checkpoint,
)

NAME = "model.layers.0.mlp.up_proj.weight"
BASE = NAME.removesuffix("weight")
SHAPE = (144, 160)  # two blocks of rows and two of columns, the second of each cut
ENCODINGS = {
    **dict.fromkeys(PLAIN_KINDS, Encoding.PLAIN),
    **{"nvfp4": Encoding.NVFP4, "nvfp4_packed": Encoding.NVFP4_PACKED},
    **dict.fromkeys(("fp8_block", "fp8_packed_block"), Encoding.FP8_BLOCK),
    **dict.fromkeys(("fp8_tensor", "fp8_tensor_1", "fp8_channel", "fp8_channel_flat"), Encoding.FP8_SCALED),
}


def gaussian(shape=SHAPE, seed=0):
    """Rows, columns and blocks of very different sizes, so that a scale in the wrong place is seen."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1)) + rng.standard_normal(shape[1:]))


def stored(folder, tensors, name=NAME, shape=SHAPE):
    """`find` over a folder that holds these tensors."""
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", {key: np.asarray(value) for key, value in tensors.items()})
    return find(read_header(folder / "model.safetensors"), folder, name, shape)


def check_decoded(found, truth, exact=True):
    for dtype in (np.dtype(np.float32), np.dtype(BF16)):
        got = found.decoded(dtype)
        assert got.dtype == dtype and got.shape == found.shape
        expected = truth.astype(np.float32).astype(dtype)
        if exact:
            np.testing.assert_array_equal(got, expected)
        else:  # 1 / global scale is rounded to float32 once before the product is
            tolerance = 1.2e-7 if dtype == np.float32 else 2.0**-8
            np.testing.assert_allclose(got.astype(np.float64), truth, rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [SHAPE, (3, 16), (1, 48), (128, 128), (300, 32)], ids=str)
def test_each_encoding_is_its_definition(tmp_path, kind, shape, monkeypatch):
    monkeypatch.setattr(quant.row_panels, "__defaults__", (1000,))  # several panels, across the blocks
    weight = gaussian(shape)
    truth = write_checkpoint(tmp_path, {NAME: weight}, kind)[NAME]
    reader = CheckpointReader(tmp_path)
    found = find(reader.entries, tmp_path, NAME, shape)
    one_block = kind == "fp8_packed_block" and max(shape) <= 128  # a scale of one block is one of the tensor
    assert found.encoding == (Encoding.FP8_SCALED if one_block else ENCODINGS[kind])
    assert found.shape == shape and found.name == NAME
    assert found.is_nvfp4 == (kind in NVFP4_KINDS)
    assert found.num_bytes == sum(reader.entries[name].num_bytes for name in found.names)
    assert set(reader.entries) - set(found.names) <= {BASE + "input_scale", BASE + "input_global_scale"}
    check_decoded(found, truth, exact=kind != "nvfp4_packed")
    error = np.linalg.norm(truth - weight) / np.linalg.norm(weight)
    assert error < (0.004 if kind in PLAIN_KINDS else 0.15 if kind in NVFP4_KINDS else 0.05)


@pytest.mark.parametrize("kind", NVFP4_KINDS)
def test_the_parts_of_nvfp4(tmp_path, kind):
    found = stored(tmp_path, encode(NAME, gaussian(), kind))
    codes, scales, factor = found.codes(), found.scales(), found.multiplier()
    assert (codes.dtype, codes.shape) == (np.uint8, (144, 80)) and not codes.flags.writeable
    assert (scales.dtype, scales.shape) == (E4M3, (144, 10)) and not scales.flags.writeable
    assert type(factor) is np.float32
    np.testing.assert_allclose(quant.decode(codes, scales, factor), found.decoded(np.float32), rtol=1e-7, atol=0)
    on_device = quant.dequantise(codes, scales, factor, axis=1, dtype=np.float32)
    np.testing.assert_array_equal(on_device, found.decoded(np.float32))
    narrow = quant.dequantise(codes, scales, factor, axis=1, dtype=BF16)
    np.testing.assert_array_equal(np.asarray(narrow), found.decoded(BF16))


@pytest.mark.parametrize("search", [False, True])
def test_a_file_of_the_own_quantiser(tmp_path, search):
    codes, scales, factor = quant.quantise(gaussian(), search=search)
    tensors = {NAME: codes, BASE + "weight_scale": scales, BASE + "weight_scale_2": factor}
    check_decoded(stored(tmp_path, tensors), decode({k: np.asarray(v) for k, v in tensors.items()}, NAME))


@pytest.mark.parametrize("kind", NVFP4_KINDS)
def test_gate_and_up_keep_their_own_global_scales(tmp_path, kind):
    names = [f"model.layers.3.mlp.experts.7.{half}_proj.weight" for half in ("gate", "up")]
    weights = {names[0]: gaussian(seed=1), names[1]: gaussian(seed=2) * 10}
    truth = write_checkpoint(tmp_path, weights, kind)
    reader = CheckpointReader(tmp_path)
    found = [find(reader.entries, tmp_path, name, SHAPE) for name in names]
    assert found[1].multiplier() > 3 * found[0].multiplier()
    for one, name in zip(found, names, strict=True):
        check_decoded(one, truth[name], exact=kind == "nvfp4")


@pytest.mark.parametrize("shards", [1, 3])
def test_all_encodings_in_one_checkpoint(tmp_path, shards):
    weights = {f"model.layers.{i}.mlp.down_proj.weight": gaussian(seed=i) for i in range(len(KINDS))}
    kinds = dict(zip(weights, KINDS, strict=True))
    weights["model.norm.weight"] = np.ones(160)
    weights["model.layers.3.mlp.gate.e_score_correction_bias"] = np.linspace(-1, 1, 8)
    truth = write_checkpoint(tmp_path, weights, kinds, shards=shards)
    reader = CheckpointReader(tmp_path)
    used = set()
    for name, weight in weights.items():
        found = find(reader.entries, tmp_path, name, weight.shape)
        assert found.encoding == (ENCODINGS[kinds[name]] if name in kinds else Encoding.PLAIN)
        used |= set(found.names)
        np.testing.assert_allclose(found.decoded(np.float32), truth[name].astype(np.float32), rtol=1.2e-7, atol=0)
    assert left_out(reader.entries, used, 20) == {"activation scales": 2}


@pytest.mark.parametrize("name", ["model.norm.weight", "router_bias", "model.x.bias"])
def test_vectors_and_other_names_are_plain(tmp_path, name):
    found = stored(tmp_path, {name: np.arange(5, dtype=np.float32)}, name, (5,))
    assert found.encoding is Encoding.PLAIN and found.names == (name,)
    same = found.decoded(np.float32)
    assert same.tolist() == [0, 1, 2, 3, 4] and not same.flags.writeable  # the map itself
    with pytest.raises(CheckpointError, match="dtype U8"):
        stored(tmp_path, {name: np.zeros(5, np.uint8)}, name, (5,))
    with pytest.raises(ValueError, match="no NVFP4 codes"):
        found.codes()
    with pytest.raises(ValueError, match="dtype: got float16"):
        found.decoded(np.float16)


def test_a_scalar_and_an_empty_weight(tmp_path):
    assert stored(tmp_path, {"x": np.float32(3)}, "x", ()).decoded(BF16) == 3
    for shape in ((0, 16), (16, 0)):
        for dtype in (np.float32, E4M3):
            tensors = {NAME: np.zeros(shape, dtype)}
            if dtype == E4M3:
                tensors[BASE + "weight_scale"] = np.float32(1)
            assert stored(tmp_path, tensors, shape=shape).decoded(np.float32).shape == shape
        halves, groups = np.zeros((shape[0], shape[1] // 2), np.uint8), np.zeros((shape[0], shape[1] // 16), E4M3)
        tensors = {NAME: halves, BASE + "weight_scale": groups, BASE + "weight_scale_2": np.float32(1)}
        assert stored(tmp_path, tensors, shape=shape).decoded(np.float32).shape == shape


F32 = np.float32
ONE = F32(1)


def with_parts(weight, **parts):
    return {(NAME if weight is not None else ""): weight} | {BASE + key: value for key, value in parts.items()}


def halves(dtype=np.uint8):
    return np.zeros((144, 80), dtype)


def groups(dtype=E4M3):
    return np.ones((144, 10), dtype)


FP8 = np.zeros(SHAPE, E4M3)
REFUSED = {
    "missing": ({"other": ONE}, "'model.layers.0.mlp.up_proj.weight' is missing"),
    "only scales": (with_parts(ONE, weight_scale=groups()) | {NAME: None}, "up_proj.weight' is missing"),
    "plain: shape": ({NAME: np.zeros((160, 144), F32)}, "shape \\(160, 144\\), expected \\(144, 160\\)"),
    "plain: integers": ({NAME: np.zeros(SHAPE, np.int8)}, "dtype I8.*supported are"),
    "plain with a scale": (with_parts(np.zeros(SHAPE, BF16), weight_scale=ONE), "weight_scale' makes.*BF16.*supported"),
    "nvfp4: no scale": (with_parts(halves(), weight_scale_2=ONE), "weight_scale' is missing beside"),
    "nvfp4: no scale at all": (with_parts(halves()), "weight_scale' is missing beside"),
    "nvfp4: no global scale": (with_parts(halves(), weight_scale=groups()), "weight_scale_2' is missing beside"),
    "nvfp4: unpacked": (
        with_parts(np.zeros(SHAPE, np.uint8), weight_scale=groups(), weight_scale_2=ONE),
        "shape \\(144, 160\\), expected \\(144, 80\\)",
    ),
    "nvfp4: scales of 32 columns": (
        with_parts(halves(), weight_scale=np.ones((144, 5), E4M3), weight_scale_2=ONE),
        "weight_scale': shape \\(144, 5\\), expected \\(144, 10\\)",
    ),
    "nvfp4: wide scales": (
        with_parts(halves(), weight_scale=groups(F32), weight_scale_2=ONE),
        "weight_scale': dtype F32, expected F8_E4M3",
    ),
    "nvfp4: scales E5M2": (
        with_parts(halves(), weight_scale=groups(ml_dtypes.float8_e5m2), weight_scale_2=ONE),
        "weight_scale': dtype F8_E5M2, expected F8_E4M3",
    ),
    "mxfp4": (
        with_parts(halves(), weight_scale=np.zeros((144, 5), np.uint8)),
        "weight_scale': dtype U8, expected F8_E4M3",
    ),
    "nvfp4: global scale a vector": (
        with_parts(halves(), weight_scale=groups(), weight_scale_2=np.ones(2, F32)),
        "weight_scale_2': shape \\(2,\\)",
    ),
    "nvfp4: global scale bfloat16": (
        with_parts(halves(), weight_scale=groups(), weight_scale_2=np.ones(1, BF16)),
        "weight_scale_2': dtype BF16, expected F32",
    ),
    "nvfp4: both global scales": (
        with_parts(halves(), weight_scale=groups(), weight_scale_2=ONE, weight_global_scale=ONE),
        "weight_global_scale' makes",
    ),
    "nvfp4: scaled activations": (
        with_parts(halves(), weight_scale=groups(), weight_scale_2=ONE, pre_quant_scale=np.ones(160, BF16)),
        "pre_quant_scale' makes",
    ),
    "packed: no global scale": (
        {BASE + "weight_packed": halves(), BASE + "weight_scale": groups()},
        "weight_global_scale' is missing",
    ),
    "packed: no scale": ({BASE + "weight_packed": halves(), BASE + "weight_global_scale": ONE}, "_scale' is missing"),
    "packed and plain": (
        with_parts(np.zeros(SHAPE, F32), weight_packed=halves(), weight_scale=groups(), weight_global_scale=ONE),
        "makes",
    ),
    "packed: shape": (
        {BASE + "weight_packed": np.zeros((144, 20), np.uint8)},
        "weight_packed': shape \\(144, 20\\), expected \\(144, 80\\)",
    ),
    "packed: integers": (
        {
            BASE + "weight_packed": np.zeros((144, 20), np.int32),
            BASE + "weight_scale": np.ones((144, 2), BF16),
            BASE + "weight_shape": np.array([144, 160]),
        },
        "weight_shape' makes.*I32.*supported are float weights, NVFP4",
    ),
    "packed: integers without a shape": ({BASE + "weight_packed": np.zeros((144, 20), np.int32)}, "dtype I32"),
    "packed: zero points": (
        {BASE + "weight_packed": halves(), BASE + "weight_zero_point": np.zeros((144, 1), np.int8)},
        "weight_zero_point' makes",
    ),
    "packed: group indices": (
        {BASE + "weight_packed": halves(), BASE + "weight_g_idx": np.zeros(160, np.int32)},
        "weight_g_idx' makes",
    ),
    "int8": (
        with_parts(np.zeros(SHAPE, np.int8), weight_scale=np.ones((144, 1), BF16)),
        "weight_scale' makes.*I8.*supported are",
    ),
    "gptq": ({BASE + "qweight": np.zeros((20, 144), np.int32)}, "qweight' makes.*supported are"),
    "fp8: no scale": (with_parts(FP8), "weight_scale' is missing beside"),
    "fp8: two scales": (
        with_parts(FP8, weight_scale=ONE, weight_scale_inv=np.ones((2, 2), F32)),
        "weight_scale' makes",
    ),
    "fp8: E5M2": (with_parts(np.zeros(SHAPE, ml_dtypes.float8_e5m2), weight_scale=ONE), "makes.*F8_E5M2"),
    "fp8: shape": (with_parts(np.zeros((144, 161), E4M3), weight_scale=ONE), "shape \\(144, 161\\), expected"),
    "fp8: blocks of 64": (
        with_parts(FP8, weight_scale_inv=np.ones((3, 3), F32)),
        "weight_scale_inv': shape \\(3, 3\\), expected \\(2, 2\\)",
    ),
    "fp8: scale by column": (with_parts(FP8, weight_scale=np.ones((1, 160), F32)), "shape \\(1, 160\\), expected"),
    "fp8: scale in float16": (with_parts(FP8, weight_scale=np.ones(1, np.float16)), "dtype F16, expected F32 or BF16"),
    "fp8: blocks in float8": (with_parts(FP8, weight_scale_inv=np.ones((2, 2), E4M3)), "dtype F8_E4M3, expected F32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_headers_that_are_no_encoding(tmp_path, case):
    tensors, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as raised:
        stored(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    assert str(tmp_path) in str(raised.value)


def test_columns_that_are_no_whole_groups(tmp_path):
    for suffix in ("weight", "weight_packed"):
        with pytest.raises(CheckpointError, match="24 columns, expected a multiple of 16"):
            stored(tmp_path, {BASE + suffix: np.zeros((4, 12), np.uint8)}, shape=(4, 24))


def damaged(folder, kind, change, weight=None):
    """A weight in this encoding, its tensors changed by `change(tensors by the last part of their names)`."""
    tensors = encode(NAME, gaussian() if weight is None else weight, kind)
    parts = {name.removeprefix(BASE): np.array(tensor) for name, tensor in tensors.items()}
    change(parts)
    return stored(folder, {BASE + part: tensor for part, tensor in parts.items()})


def as_bits(parts):
    """Views of the same arrays as unsigned integers."""
    return {part: tensor.view(f"u{tensor.itemsize}") for part, tensor in parts.items()}


def put(part, value, at=0):
    def change(parts):
        flat = parts[part].reshape(-1)
        flat[at] = value

    return change


BAD_GLOBAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, 1e-40, 3e38)


@pytest.mark.parametrize("kind", NVFP4_KINDS)
@pytest.mark.parametrize("value", BAD_GLOBAL)
def test_bad_global_scales(tmp_path, kind, value):
    part = "weight_scale_2" if kind == "nvfp4" else "weight_global_scale"
    found = damaged(tmp_path, kind, put(part, value))
    for read in (found.multiplier, lambda: found.decoded(np.float32)):
        with pytest.raises(CheckpointError, match=f"{tmp_path}.*up_proj.*global scale"):
            read()


@pytest.mark.parametrize("kind", NVFP4_KINDS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, -1.0, -(2.0**-9), -0.0])
@pytest.mark.parametrize("at", [0, 777, 1439])
def test_bad_block_scales(tmp_path, kind, value, at):
    found = damaged(tmp_path, kind, put("weight_scale", value, at))
    for read in (found.scales, lambda: found.decoded(BF16)):
        with pytest.raises(CheckpointError, match="up_proj.*block scale is NaN or negative"):
            read()


@pytest.mark.parametrize("kind", NVFP4_KINDS)
def test_a_zero_block_scale_needs_zero_codes(tmp_path, kind):
    weight = gaussian()
    weight[5, 32:48] = 0
    codes = "weight" if kind == "nvfp4" else "weight_packed"

    def change(parts, code=None):
        parts["weight_scale"][5, 2] = 0
        assert not parts[codes][5, 16:24].any()
        parts[codes][5, 18] = 0x88  # -0, -0
        if code is not None:
            parts[codes][5, 23] = code

    found = damaged(tmp_path, kind, change, weight)
    assert found.scales()[5, 2] == 0 and not found.decoded(np.float32)[5, 32:48].any()
    for code in (0x10, 0x01, 0x98, 0x77):
        found = damaged(tmp_path, kind, lambda parts, code=code: change(parts, code), weight)
        with pytest.raises(CheckpointError, match="block scale is zero where the weights are not"):
            found.scales()


FP8_SCALES = {
    "fp8_block": ("weight_scale_inv", 3, (slice(128, None), slice(128, None))),
    "fp8_tensor": ("weight_scale", 0, (slice(None), slice(None))),
    "fp8_channel": ("weight_scale", 143, (143, slice(None))),
    "fp8_channel_flat": ("weight_scale", 7, (7, slice(None))),
}


@pytest.mark.parametrize("kind", FP8_SCALES)
def test_bad_fp8_values(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(quant.row_panels, "__defaults__", (3000,))
    part, at, covered = FP8_SCALES[kind]
    for value in (np.nan, np.inf, -1.0, 3e38):
        with pytest.raises(CheckpointError, match="up_proj.*a scale is negative, NaN"):
            damaged(tmp_path, kind, put(part, value, at)).decoded(np.float32)
    signalling = 0x7F81 if kind == "fp8_channel" else 0x7F800001  # bits of a NaN that warns when it is cast
    with pytest.raises(CheckpointError, match="up_proj.*a scale is negative, NaN"):
        damaged(tmp_path, kind, lambda parts: put(part, signalling, at)(as_bits(parts))).decoded(np.float32)
    with pytest.raises(CheckpointError, match="scale is zero where the weights are not"):
        damaged(tmp_path, kind, put(part, 0, at)).decoded(np.float32)
    for place in (0, 144 * 160 - 1):
        for value in (np.nan, -np.nan):
            with pytest.raises(CheckpointError, match="up_proj.*NaN values"):
                damaged(tmp_path, kind, put("weight", value, place)).decoded(BF16)

    def blank(parts):
        parts[part].reshape(-1)[at] = 0
        parts["weight"][covered] = -0.0

    got = damaged(tmp_path, kind, blank).decoded(np.float32)
    assert not got[covered].any() and (kind == "fp8_tensor" or got.any())


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_plain_weights_must_be_finite(tmp_path, kind, value, monkeypatch):
    monkeypatch.setattr(quant.row_panels, "__defaults__", (1000,))
    for at, dtype in itertools.product((0, 11111, 144 * 160 - 1), (np.float32, BF16)):
        with pytest.raises(CheckpointError, match=f"{tmp_path}.*up_proj.*NaN or infinite"):
            damaged(tmp_path, kind, put("weight", value, at)).decoded(dtype)


def test_values_beyond_the_wanted_dtype(tmp_path):
    weight = np.full(SHAPE, 3.4e38, F32)
    found = stored(tmp_path, {NAME: weight})
    np.testing.assert_array_equal(found.decoded(np.float32), weight)
    with pytest.raises(CheckpointError, match="beyond the range of bfloat16"):
        found.decoded(BF16)
    with pytest.raises(CheckpointError, match="beyond the range of float32"):
        stored(tmp_path, {NAME: np.full(SHAPE, 1e300)}).decoded(np.float32)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32])
def test_all_finite_is_right_for_every_exponent(dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(dtype) if np.dtype(dtype).itemsize == 2 else (bits.astype(np.uint32) << 16).view(dtype)
    with np.errstate(invalid="ignore"):
        expected = np.isfinite(values.astype(np.float64))
    assert not expected.all()
    for value, finite in zip(values[::7], expected[::7], strict=True):
        assert all_finite(np.array([1, value], dtype)) == finite
    assert all_finite(values[expected]) and not all_finite(values)
    assert all_finite(np.zeros(0, dtype))


def test_large_weights_are_decoded_in_panels(tmp_path):
    import tracemalloc

    shape = (2048, 2048)
    codes = np.random.default_rng(0).integers(0, 256, (2048, 1024), np.uint8)
    tensors = {
        "nvfp4": with_parts(codes, weight_scale=np.ones((2048, 128), E4M3), weight_scale_2=ONE),
        "fp8": with_parts(np.ones(shape, E4M3), weight_scale_inv=np.ones((16, 16), F32)),
        "plain": {NAME: np.ones(shape, BF16)},
    }
    for kind, parts in tensors.items():
        found = stored(tmp_path / kind, parts, shape=shape)
        tracemalloc.start()
        try:
            out = found.decoded(BF16)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < (0 if kind == "plain" else out.nbytes) + 6_000_000, kind


def test_what_is_left_out_is_counted_by_kind():
    names = {
        "MTP layer": ["layers.78.eh_proj.weight", "layers.78.self_attn.indexer.wk.weight", "layers.79.a.input_scale"],
        "activation scales": ["layers.3.mlp.experts.0.up_proj.input_scale", "layers.77.o_proj.input_global_scale"],
        "k/v scales": ["layers.0.self_attn.k_proj.k_scale", "layers.0.self_attn.v_proj.v_scale"],
        "indexer of shared layers": ["layers.4.self_attn.indexer.wk.weight", "layers.4.self_attn.indexer.k_norm.bias"],
        "unknown": ["surprise", "layers.5.mlp.new.weight", "layers." + "9" * 5000 + ".x"],
    }
    every = [f"model.{name}" for part in names.values() for name in part]
    used = {"model.layers.0.self_attn.indexer.wk.weight", "model.norm.weight"}
    assert left_out([*every, *used], used, 78) == {category: len(part) for category, part in names.items()}
    assert left_out(used, used, 78) == {}


def test_the_helper_reads_back_what_it_wrote(tmp_path):
    truth = write_checkpoint(tmp_path, {NAME: gaussian()}, "nvfp4")
    np.testing.assert_array_equal(decode(read_file(tmp_path / "model.safetensors"), NAME), truth[NAME])
