"""Corpus and tokens: the split, the rules, the round trip of the tokenizer, the held-out prompts."""

import json
from pathlib import Path

import numpy as np
import pytest
from demo_training import corpus, modules, tokens
from hypothesis import given, settings
from hypothesis import strategies as st


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def body(seed: int, lines: int = 40) -> str:
    rng = np.random.default_rng(seed)
    names = ["alpha", "beta", "gamma", "delta", "loop", "value", "index", "total"]
    out = []
    for _ in range(lines):
        a, b, c = rng.choice(names, 3)
        out.append(f"def {a}_{rng.integers(1000)}({b}, {c}):\n    return {b} + {c} * {rng.integers(1000)}\n")
    return "\n".join(out)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "pkg"
    for i in range(60):
        write(folder, f"module_{i}.py", body(i))
    return folder


def test_rules_leave_out_what_they_should(tmp_path: Path) -> None:
    folder = tmp_path / "pkg"
    write(folder, "good.py", body(1))
    write(folder, "copy/of_good.py", body(1))
    write(folder, "short.py", "x = 1\n")
    write(folder, "long_line.py", body(2) + "x = '" + "a" * 2001 + "'\n")
    write(folder, "nul.py", body(3) + "\0")
    write(folder, "_vendor/other.py", body(4))
    write(folder, "notes.txt", body(5))
    (folder / "latin.py").write_bytes(body(6).encode() + b"# \xe9\n")
    chosen = corpus.select(corpus.folder_sources(folder))
    assert [Path(item.path).name for item in chosen] in (["good.py"], ["of_good.py"])


def test_a_text_of_both_parts_stays_held_out(tmp_path: Path) -> None:
    names = [f"file_{i}.py" for i in range(300)]
    held = next(n for n in names if corpus.is_heldout(f"pkg/{n}"))
    kept = next(n for n in names if not corpus.is_heldout(f"pkg/{n}"))
    for name in (held, kept):
        write(tmp_path / "pkg", name, body(9))
    chosen = corpus.select(corpus.folder_sources(tmp_path / "pkg"))
    assert [item.name for item in chosen] == [f"pkg/{held}"]


def test_split_depends_on_the_name_alone(sources: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "pkg"
    for path in sources.rglob("*.py"):
        write(other, path.relative_to(sources).as_posix(), path.read_text())
    first, second = (corpus.select(corpus.folder_sources(f, 200)) for f in (sources, other))
    assert [(a.name, a.heldout) for a in first] == [(b.name, b.heldout) for b in second]
    assert 0 < sum(item.heldout for item in first) < len(first)


def test_only_named_packages_of_this_machine_are_read() -> None:
    packages = {item.package for item in corpus.installed_sources()}
    assert "python" in packages and "numpy" in packages
    assert packages <= {"python", *corpus.PACKAGE_LICENSES}
    assert "hypothesis" not in packages  # MPL-2.0


@pytest.fixture(scope="module")
def tokenizer():
    return tokens.train_tokenizer([body(i) for i in range(20)], 400)


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_round_trip_of_any_text(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_in_sources_stay_text(tokenizer) -> None:
    ids = tokens.encode_text(tokenizer, f"end = '{tokens.END_TOKEN}'\nmask = '{tokens.MASK_TOKEN}'\n")
    assert tokens.END_ID not in ids and tokens.MASK_ID not in ids


def test_join_documents_ends_each() -> None:
    joined = tokens.join_documents([np.array([5, 6], np.uint16), np.array([7], np.uint16)])
    assert joined.tolist() == [5, 6, 0, 7, 0]


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), run=st.integers(1, 9))
def test_copied_runs_against_a_plain_search(seed: int, run: int) -> None:
    rng = np.random.default_rng(seed)
    train = rng.integers(0, 3, 60).astype(np.uint16)
    rows = rng.integers(0, 3, (5, 12)).astype(np.uint16)
    present = {tuple(train[i : i + run]) for i in range(len(train) - run + 1)}
    expected = [any(tuple(row[i : i + run]) in present for i in range(len(row) - run + 1)) for row in rows]
    assert tokens.copied_runs(rows, train, run).tolist() == expected


def test_prepare_writes_prompts_of_heldout_files_only(sources: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    files = corpus.select(corpus.folder_sources(sources, 200))
    summary = tokens.prepare(
        files,
        work,
        vocab_size=400,
        num_prompts=30,
        prompt_tokens=32,
        reference_tokens=16,
        heldout_tokens=5000,
        seed=1,
        num_workers=0,
    )
    prompts = json.loads((work / "heldout.json").read_text())
    assert len(prompts) == summary["prompts"] > 4
    held = {item.name: item for item in files if item.heldout}
    tokenizer = tokens.tokenizers.Tokenizer.from_file(str(work / "tokenizer.json"))
    starts: dict[str, list[int]] = {}
    for prompt in prompts:
        assert prompt["source"] in held
        text = Path(held[prompt["source"]].path).read_text()
        assert prompt["prompt"] + prompt["reference"] in text
        start = text.index(prompt["prompt"] + prompt["reference"])
        assert start == 0 or text[start - 1] == "\n"
        assert tokenizer.encode(prompt["prompt"]).ids == prompt["prompt_ids"] and len(prompt["prompt_ids"]) == 32
        starts.setdefault(prompt["source"], []).append(start)
    most = max(len(found) for found in starts.values())
    assert 1 < most <= tokens.PROMPTS_PER_FILE
    shortest = min(len(prompt["prompt"] + prompt["reference"]) for prompt in prompts)
    for found in map(sorted, starts.values()):
        assert all(after - before >= shortest for before, after in zip(found, found[1:], strict=False))
    train = np.load(work / "train.npy")
    rows = np.asarray([prompt["prompt_ids"] for prompt in prompts], np.uint16)
    assert not tokens.copied_runs(rows, train, 32).any()
    # The tokenizer of an earlier machine is kept.
    before = (work / "tokenizer.json").read_bytes()
    (work / "heldout.json").write_text("[]")
    with pytest.raises(ValueError, match="held-out"):
        tokens.prepare(
            [item for item in files if not item.heldout],
            work,
            vocab_size=300,
            num_prompts=1,
            prompt_tokens=32,
            reference_tokens=16,
            heldout_tokens=5000,
            seed=1,
            num_workers=0,
        )
    assert (work / "tokenizer.json").read_bytes() == before and (work / "heldout.json").read_text() == "[]"


@pytest.mark.parametrize("with_standard_library", [True, False])
def test_prompts_come_from_the_standard_library_where_there_is_one(tokenizer, with_standard_library: bool) -> None:
    names = ["pkg/a.py", "pkg/python/b.py", *["python/c.py", "python/json/d.py"][: 2 * with_standard_library]]
    files = [corpus.SourceFile("", name, name.split("/")[0], "MIT", True) for name in names]
    documents = [tokens.encode_text(tokenizer, body(100 + i)) for i in range(len(files))]
    arguments = dict(count=1000, prompt_tokens=24, reference_tokens=8)
    prompts = tokens.heldout_prompts(files, documents, np.zeros(99, np.uint16), tokenizer, **arguments, seed=3)
    counts = {name: sum(prompt.source == name for prompt in prompts) for name in names}
    assert all(counts[name] == 0 for name in names[:2]) if with_standard_library else all(counts.values())
    assert all(0 < counts[name] <= tokens.PROMPTS_PER_FILE for name in (names[2:] or names))
    again = tokens.heldout_prompts(files, documents, np.zeros(99, np.uint16), tokenizer, **arguments, seed=3)
    assert again == prompts
    for name, ids in zip(names, documents, strict=True):
        rows = np.lib.stride_tricks.sliding_window_view(ids, 24)
        found = [p.prompt_ids for p in prompts if p.source == name]
        starts = sorted(int(np.flatnonzero((rows == row).all(axis=1))[0]) for row in found)
        assert all(after - before >= 24 + 8 for before, after in zip(starts, starts[1:], strict=False))


def test_encoding_processes_agree_with_one_process(sources: Path, tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    files = corpus.select(corpus.folder_sources(sources))
    files = files + files  # more than one group
    alone, together = (tokens.encode_files(files, path, workers) for workers in (0, 2))
    assert len(alone) == len(together) > 64
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a, b)


def test_windows_cover_the_text_once_an_epoch() -> None:
    train = np.arange(1000, dtype=np.uint16)
    batches = modules.windows(train, 10, 7, seed=0)
    starts = [int(row[0]) for _ in range(14) for row in next(batches)]
    first_epoch = starts[:98]
    assert len(set(first_epoch)) == 98 and len({s % 10 for s in first_epoch}) == 1
    with pytest.raises(ValueError, match="too short"):
        next(modules.windows(train[:15], 10, 1, seed=0))
