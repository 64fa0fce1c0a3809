"""Random damage to a checkpoint folder, each case with the only weights that a loader may give for it.

Damage to structure (headers, index, files) must be refused or without effect. Changed values have a right answer of
their own: by the definition of the encoding they are either new weights or against a rule.

    case = mutate(folder, weights, seed)         # a copy of a good folder, changed in place
    try: got = load(folder)
    except CheckpointError: assert case.may_refuse
    else: assert case.weights is not None and equal(got, case.weights)
"""

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from ddtree_jax.safetensors_files import write_safetensors
from tests.engine.checkpoint_files import decode, read_file

INDEX = "model.safetensors.index.json"
NONSENSE = (
    None,
    True,
    -1,
    0,
    3.5,
    float("nan"),
    "x",
    "\ud800",
    [],
    {},
    [[]],
    {"a": 1},
    10**12,
    2**61,
    10**400,
    [2**40],
)
# Which 2-byte floats a plain tensor holds only its header can say, so F16 for BF16 is no damage that can be seen.
DTYPES = ("F64", "F32", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL", "I16", "I32", "F4", "F33", "bf16", "")
NUMBERS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, -0.0, 1e-40, 3e38, 0.37, 2.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """What was done, and what may come of it.

    Attributes:
      mutation: the name of its function.
      what: for the test's message.
      weights: name -> float64, the weights that a load which succeeds must give; None: it must be refused.
      may_refuse: whether `CheckpointError` is a right answer.
    """

    mutation: str
    what: str
    weights: Mapping[str, np.ndarray] | None
    may_refuse: bool


def mutate(folder: Path, weights: Mapping[str, np.ndarray], seed: int) -> Case:
    """Damages the folder in one way chosen by the seed; `weights` is what it holds."""
    rng = random.Random(seed)
    groups = [HEADERS, FILES, VALUES] + [INDICES] * (folder / INDEX).exists()
    mutation = rng.choice(rng.choice(groups))
    kind = mutation.__name__
    what = f"seed {seed}: {kind.strip('_')}: "
    if mutation in VALUES:
        path = _shard(folder, rng)
        note = mutation(path, rng)
        changed = true_weights(folder, weights)
        return Case(kind, what + note, changed, changed is None)
    return Case(kind, what + str(mutation(folder, rng)), weights, True)


def true_weights(folder: Path, names: Mapping[str, object]) -> dict[str, np.ndarray] | None:
    """The weights of a folder of whole structure; None if a value of any breaks a rule."""
    index = folder / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    tensors = {name: tensor for file in files for name, tensor in read_file(folder / file).items()}
    out = {name: decode(tensors, name) for name in names}
    return None if any(weight is None for weight in out.values()) else out


def _shard(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _split(path: Path) -> tuple[bytes, bytes]:
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end], raw[end:]


def _join(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _flip(raw: bytes, rng: random.Random, start: int, end: int) -> tuple[bytes, int]:
    damaged, at = bytearray(raw), rng.randrange(start, end)
    damaged[at] ^= 1 << rng.randrange(8)
    return bytes(damaged), at


# ---- headers


def _flip_header(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    raw, at = _flip(path.read_bytes(), rng, 8, 8 + len(_split(path)[0]))
    path.write_bytes(raw)
    return f"byte {at} of {path.name}"


def _flip_length(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    raw, at = _flip(path.read_bytes(), rng, 0, 8)
    path.write_bytes(raw)
    return f"byte {at} of {path.name}"


def _other_length(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    raw = path.read_bytes()
    length = rng.choice([0, 1, 2**63, 2**64 - 1, 10**8, int.from_bytes(raw[:8], "little") + rng.randint(-9, 9)])
    path.write_bytes(max(0, length).to_bytes(8, "little") + raw[8:])
    return f"{length} in {path.name}"


def _edit_header(change: Callable[[dict, random.Random], object]) -> Callable[[Path, random.Random], str]:
    def mutation(folder: Path, rng: random.Random) -> str:
        path = _shard(folder, rng)
        text, data = _split(path)
        header = json.loads(text)
        note = change(header, rng)
        _join(path, json.dumps(header).encode(), data)
        return f"{note} in {path.name}"

    mutation.__name__ = change.__name__
    return mutation


def _pick(header: dict, rng: random.Random) -> str:
    return rng.choice([name for name in header if name != "__metadata__"])


def _other_dtype(header, rng):
    name = _pick(header, rng)
    header[name]["dtype"] = rng.choice(DTYPES)
    return name, header[name]["dtype"]


def _other_shape(header, rng):
    name = _pick(header, rng)
    shape = header[name]["shape"]
    new = [shape[::-1], [*shape, 1], [1, *shape], shape[1:], [*shape, 0], [-1, *shape], [2**31, 2**31, *shape], []]
    new += [[2**61], [0, 2**61, 2**61], [float(v) for v in shape], [True, *shape], [1] * 70, [10**4000], str(shape)]
    if shape:
        new.append([shape[0] + 1, *shape[1:]])
    header[name]["shape"] = rng.choice(new)
    return name, str(header[name]["shape"])[:80]


def _other_offsets(header, rng):
    name = _pick(header, rng)
    start, end = header[name]["data_offsets"]
    by = rng.choice([1, -1, 4, -4, 8, 4096, 2**40, 2**63, 10**4000])
    new = [[start + by, end + by], [start, end + by], [start + by, end], [end, start], [start], [], "0", [0.0, 1.0]]
    header[name]["data_offsets"] = rng.choice(new)
    return name, str(header[name]["data_offsets"])[:80]


def _offsets_of_another(header, rng):
    name, other = _pick(header, rng), _pick(header, rng)
    header[name]["data_offsets"] = header[other]["data_offsets"]
    return name, other


def _drop_tensor(header, rng):
    name = _pick(header, rng)
    del header[name]
    return name


def _rename_tensor(header, rng):
    name = _pick(header, rng)
    new = rng.choice([name + "_inv", name + "_2", name[:-1], "", "\0", "x" * 10**5, "model.layers.1." + name])
    header[new] = header.pop(name)
    return name, new[:80]


def _rename_to_another(header, rng):
    """The last part of a name becomes another's: the weight becomes an odd mixture."""
    name = _pick(header, rng)
    base = name.rpartition(".")[0]
    parts = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale")
    new = f"{base}.{rng.choice((*parts, 'weight_shape', 'weight_zero_point', 'qweight', 'input_scale'))}"
    info = header.pop(name)
    header.setdefault(new, info)
    return name, new


def _odd_entry(header, rng):
    name = _pick(header, rng)
    header[name] = rng.choice(NONSENSE)
    return name, str(header[name])[:80]


def _odd_value(header, rng):
    name = _pick(header, rng)
    key = rng.choice(["dtype", "shape", "data_offsets"])
    header[name][key] = rng.choice([value for value in NONSENSE if value != []])  # [] is the shape of a scalar
    return name, key, str(header[name][key])[:80]


def _drop_key(header, rng):
    name = _pick(header, rng)
    return name, header[name].pop(rng.choice(["dtype", "shape", "data_offsets"]))


def _name_twice(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    text, data = _split(path)
    header = json.loads(text)
    name, other = _pick(header, rng), _pick(header, rng)
    again = json.dumps({name: header[other]})[1:-1].encode()
    _join(path, text.rstrip()[:-1] + b"," + again + b"}", data)
    return f"{name} in {path.name}"


def _again_with_zeros(folder: Path, rng: random.Random) -> str:
    """A name given twice, both entries whole: the second lies in bytes of its own."""
    path = _shard(folder, rng)
    text, data = _split(path)
    header = json.loads(text)
    name = _pick(header, rng)
    start, end = header[name]["data_offsets"]
    again = header[name] | {"data_offsets": [len(data), len(data) + end - start]}
    _join(path, text.rstrip()[:-1] + b"," + json.dumps({name: again})[1:].encode(), data + bytes(end - start))
    return f"{name} in {path.name}"


def _length_within_padding(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    text, data = _split(path)
    text = text.rstrip()
    padding, less = rng.randint(1, 15), rng.randint(1, 15)
    path.write_bytes((len(text) + max(0, padding - less)).to_bytes(8, "little") + text + b" " * padding + data)
    return f"{less} of {padding} in {path.name}"


def _other_text(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    text, data = _split(path)
    new = [b"", b"{", b"[]", b"null", b"\xff" + text, text[:-9], b"[" * 10**5, text.decode().encode("utf-16"), b"{}"]
    new += [b'{"a":' + b"9" * 6000 + b"}", text.replace(b"data_offsets", b"data_offset"), b"\0" * len(text)]
    chosen = rng.randrange(len(new))
    _join(path, new[chosen], data)
    return f"text {chosen} in {path.name}"


# ---- files


def _truncate(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    size = rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} to {size} bytes"


def _append(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 64)))
    return path.name


def _drop_from_the_middle(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    raw = path.read_bytes()
    at = rng.randrange(len(raw))
    path.write_bytes(raw[:at] + raw[at + rng.randint(1, 16) :])
    return f"at byte {at} of {path.name}"


def _replace_file(folder: Path, rng: random.Random) -> str:
    path = rng.choice([path for path in sorted(folder.iterdir()) if path.name.startswith("model")])
    kind = rng.choice(["gone", "folder", "pipe", "device", "dangling", "empty", "another shard"])
    other = _shard(folder, rng).read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("device", "dangling"):
        path.symlink_to("/dev/zero" if kind == "device" else folder / "nothing")
    elif kind in ("empty", "another shard"):
        path.write_bytes(b"" if kind == "empty" else other)
    return f"{path.name}: {kind}"


def _moved_and_linked(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    (folder / "blobs").mkdir()
    shutil.move(path, folder / "blobs" / "0")
    path.symlink_to(folder / "blobs" / "0")
    return path.name


# ---- index


def _flip_index(folder: Path, rng: random.Random) -> str:
    path = folder / INDEX
    raw = path.read_bytes()
    raw, at = _flip(raw, rng, 0, len(raw))
    path.write_bytes(raw)
    return f"byte {at}"


def _edit_index(change: Callable[[dict, random.Random], object]) -> Callable[[Path, random.Random], str]:
    def mutation(folder: Path, rng: random.Random) -> str:
        path = folder / INDEX
        content = json.loads(path.read_text())
        note = change(content, rng)
        path.write_text(json.dumps(content))
        return str(note)[:200]

    mutation.__name__ = change.__name__
    return mutation


def _unname(content, rng):
    name = rng.choice(sorted(content["weight_map"]))
    del content["weight_map"][name]
    return name


def _point_elsewhere(content, rng):
    shards = sorted(set(content["weight_map"].values()))
    outside = [f"../{shards[0]}", f"/tmp/{shards[0]}", f"./{shards[0]}", "..", "", "none.safetensors", "config.json"]
    name = rng.choice(sorted(content["weight_map"]))
    content["weight_map"][name] = rng.choice([*shards, *outside, *NONSENSE, "\0.safetensors", "x" * 9000])
    return name, content["weight_map"][name]


def _name_more(content, rng):
    content["weight_map"]["model.more.weight"] = rng.choice(sorted(set(content["weight_map"].values())))


def _odd_map(content, rng):
    key = rng.choice(["weight_map", "metadata"])
    content[key] = rng.choice(NONSENSE)
    return key, content[key]


def _index_twice(folder: Path, rng: random.Random) -> str:
    path = folder / INDEX
    content = json.loads(path.read_text())["weight_map"]
    name, other = rng.choice(sorted(content)), rng.choice(sorted(content.values()))
    path.write_text(f'{{"weight_map": {json.dumps(content)[:-1]}, {json.dumps(name)}: {json.dumps(other)}}}}}')
    return f"{name}: {other}"


def _tensor_in_two_shards(folder: Path, rng: random.Random) -> str:
    path, other = rng.sample(sorted(folder.glob("*.safetensors")), 2)
    tensors = read_file(path)
    name = rng.choice(sorted(tensors))
    write_safetensors(other, read_file(other) | {name: tensors[name] * 0})
    return f"{name} of {path.name} in {other.name} too"


def _stale_shard(folder: Path, rng: random.Random) -> str:
    path = _shard(folder, rng)
    stale = {name: np.zeros_like(tensor) for name, tensor in read_file(path).items()}
    name = rng.choice(["a.safetensors", "mtp.safetensors", "model.safetensors", "model-00009-of-00009.safetensors"])
    write_safetensors(folder / name, stale)
    return name


# ---- values


def _edit_values(
    part: str, change: Callable[[np.ndarray, random.Random], object]
) -> Callable[[Path, random.Random], str]:
    """Changes one tensor whose last part of the name matches."""

    def mutation(path: Path, rng: random.Random) -> str:
        tensors = read_file(path)
        fitting = [name for name in sorted(tensors) if name.rpartition(".")[2] in part.split("|")]
        if not fitting:
            return "nothing"
        name = rng.choice(fitting)
        note = change(tensors[name].reshape(-1), rng)
        write_safetensors(path, tensors)
        return f"{name} in {path.name}: {note}"

    mutation.__name__ = f"{change.__name__} of {part}"
    return mutation


def _one_number(flat, rng):
    if flat.dtype == np.uint8:
        return "nothing"
    at, value = rng.randrange(flat.size), rng.choice(NUMBERS)
    if abs(value) <= float(ml_dtypes.finfo(flat.dtype).max) or value in (np.inf, -np.inf) or value != value:
        flat[at] = value
    return at, value


def _one_byte(flat, rng):
    raw = flat.view(np.uint8)
    at, value = rng.randrange(raw.size), rng.choice([0, 0x80, 0x7F, 0xFF, 0x7E, 1, rng.randrange(256)])
    if flat.dtype.itemsize > 1:  # of a float whose other bytes stay: only what keeps it an ordinary number, or NaN
        at, value = at // flat.dtype.itemsize * flat.dtype.itemsize, rng.randrange(256)
    raw[at] = value
    return at, value


def _blank(flat, rng):
    flat.view(np.uint8)[:] = 0


HEADERS = [
    *(_flip_header, _flip_header, _flip_length, _other_length, _name_twice, _other_text),
    *(_again_with_zeros, _length_within_padding),
    *map(_edit_header, (_other_dtype, _other_shape, _other_offsets, _offsets_of_another, _drop_tensor)),
    *map(_edit_header, (_rename_tensor, _rename_to_another, _odd_entry, _odd_value, _drop_key)),
]
FILES = [_truncate, _append, _drop_from_the_middle, _replace_file, _moved_and_linked]
INDICES = [
    *(_flip_index, _flip_index, _index_twice, _tensor_in_two_shards, _stale_shard),
    *map(_edit_index, (_unname, _point_elsewhere, _name_more, _odd_map)),
]
VALUES = [
    *(_edit_values("weight_scale", _one_number), _edit_values("weight_scale", _one_byte)),
    *(_edit_values("weight_scale_2|weight_global_scale|weight_scale_inv", _one_number),),
    *(_edit_values("weight|bias", _one_byte), _edit_values("weight|bias", _one_number)),
    _edit_values("bias", _one_number),
    *(_edit_values("weight_packed", _one_byte),),
    *(_edit_values("weight_scale|weight_scale_inv|weight_scale_2", _blank),),
    *(_edit_values("input_scale|input_global_scale|k_scale", _one_number),),
]
