"""Tokenizer, token arrays and held-out prompts: what the later stages read instead of files."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from . import corpus

END_TOKEN = "<|endoftext|>"
MASK_TOKEN = "<|mask|>"
END_ID, MASK_ID = 0, 1

# A held-out continuation that shares a run of this many tokens with the training text counts as copied.
COPY_RUN = 48
PROMPTS_PER_FILE = 12
# A text that repeats a period of at most this many tokens to its end counts as a loop.
LOOP_PERIOD = 24


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer: no normaliser, no prefix space, so decode(encode(text)) == text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN, MASK_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.token_to_id(END_TOKEN) != END_ID or tokenizer.token_to_id(MASK_TOKEN) != MASK_ID:
        raise ValueError(f"the trained tokenizer does not give {END_TOKEN} and {MASK_TOKEN} the ids 0 and 1")
    return tokenizer


def sample_texts(files: Sequence[corpus.SourceFile], max_bytes: int) -> list[str]:
    """Texts of training files up to `max_bytes`; `files` are already in a shuffled order."""
    texts, total = [], 0
    for item in files:
        text = None if item.heldout else corpus.read_text(item.path)
        if text is None:
            continue
        texts.append(text)
        total += len(text)
        if total >= max_bytes:
            break
    return texts


# The tokenizer of a worker process; set once by its initialiser.
_worker: dict[str, tokenizers.Tokenizer] = {}


def _start_worker(path: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker["tokenizer"] = tokenizers.Tokenizer.from_file(path)


def _encode_files(paths: Sequence[str]) -> list[np.ndarray]:
    return [encode_text(_worker["tokenizer"], corpus.read_text(path) or "") for path in paths]


def encode_text(tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
    """Token ids of one document, uint16[T] (uint32 where the vocabulary needs it)."""
    # Sources may spell a special token inside a string; as a token it would end the document.
    for token in (END_TOKEN, MASK_TOKEN):
        text = text.replace(token, token[0] + " " + token[1:])
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, dtype)


def encode_files(
    files: Sequence[corpus.SourceFile], tokenizer_path: Path, num_workers: int | None = None
) -> list[np.ndarray]:
    """Token ids of each file, in order, encoded by `num_workers` processes (0: in this one)."""
    if num_workers is None:
        num_workers = os.cpu_count() or 1
    paths = [item.path for item in files]
    if num_workers == 0 or len(paths) < 64:
        _start_worker(str(tokenizer_path))
        return _encode_files(paths)
    groups = [paths[i : i + 64] for i in range(0, len(paths), 64)]
    # `spawn`: a forked copy of a process that runs JAX's threads may hang.
    with concurrent.futures.ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(str(tokenizer_path),),
    ) as pool:
        return [ids for group in pool.map(_encode_files, groups) for ids in group]


def join_documents(documents: Sequence[np.ndarray], end_id: int = END_ID) -> np.ndarray:
    """All documents in one array of token ids, each followed by the end token; attention may cross them."""
    end = np.asarray([end_id], documents[0].dtype if documents else np.uint16)
    return np.concatenate([part for ids in documents for part in (ids, end)] or [end])


def newline_ids(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """bool[V]: tokens whose text ends with a newline, so that the next token starts a line at column 0."""
    vocab = tokenizer.get_vocab_size()
    # In the byte-level alphabet "Ċ" stands for the newline byte.
    return np.asarray([(tokenizer.id_to_token(i) or "").endswith("Ċ") for i in range(vocab)])


def line_starts(ids: np.ndarray, ends_line: np.ndarray) -> np.ndarray:
    """Positions in `ids` where a line starts at column 0, the first position included."""
    starts = np.flatnonzero(ends_line[ids[:-1]]) + 1
    return np.concatenate([np.zeros(1, np.int64), starts])


def _run_hashes(ids: np.ndarray, run: int) -> np.ndarray:
    """uint64 hash of every run of `run` consecutive tokens, by doubling: hash(2k) from two hash(k)."""
    multiplier = np.uint64(0x9E3779B97F4A7C15)
    hashes = (ids.astype(np.uint64) + np.uint64(1)) * multiplier
    length = 1
    while length * 2 <= run:
        left, right = hashes[:-length], hashes[length:]
        hashes = (left ^ (left >> np.uint64(29))) * multiplier + right
        length *= 2
    if length < run:
        shift = run - length
        left, right = hashes[:-shift], hashes[shift:]
        hashes = (left ^ (left >> np.uint64(29))) * multiplier + right
    return hashes


def copied_runs(windows: np.ndarray, train: np.ndarray, run: int) -> np.ndarray:
    """bool[n]: which rows of `windows` [n, T] contain a run of `run` tokens that occurs in `train`."""
    if len(windows) == 0 or len(train) < run:
        return np.zeros(len(windows), bool)
    wanted = np.stack([_run_hashes(row, run) for row in windows])
    # A bit table rejects nearly all of the training text before the exact look-up.
    table = np.zeros(1 << 24, bool)
    table[wanted.ravel() >> np.uint64(40)] = True

    def hits(start: int) -> np.ndarray:
        hashes = _run_hashes(train[start : start + (1 << 22) + run - 1], run)
        return hashes[table[hashes >> np.uint64(40)]]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        parts = list(pool.map(hits, range(0, len(train) - run + 1, 1 << 22)))
    return np.isin(wanted, np.unique(np.concatenate(parts))).any(axis=1)


@dataclasses.dataclass(frozen=True)
class HeldoutPrompt:
    """A prompt from a held-out file: ids, text, where it is from, and how the file goes on."""

    id: str
    source: str
    license: str
    prompt: str
    prompt_ids: list[int]
    reference: str

    def to_dict(self) -> dict:
        """The prompt as JSON values."""
        return dataclasses.asdict(self)


def heldout_prompts(
    files: Sequence[corpus.SourceFile],
    documents: Sequence[np.ndarray],
    train: np.ndarray,
    tokenizer: tokenizers.Tokenizer,
    *,
    count: int,
    prompt_tokens: int,
    reference_tokens: int,
    seed: int,
) -> list[HeldoutPrompt]:
    """Prompts drawn with a fixed seed from held-out files, at most `PROMPTS_PER_FILE` a file, each at a line start.

    Files of the standard library only where there are any: one licence that lets the excerpts be published, and
    sources that everybody has. Prompts of a file do not overlap. Left out: prompts whose text does not encode back to
    the same ids, and those whose prompt or continuation shares a run of `COPY_RUN` tokens with the training text
    (near-copies of files cross the split otherwise).

    Args:
      files: held-out files.
      documents: token ids of each.
      train: the training tokens.
      tokenizer: the tokenizer of both.
      count: prompts wanted; fewer come back where the files hold no more.
      prompt_tokens: length of a prompt.
      reference_tokens: length of the continuation.
      seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    ends_line = newline_ids(tokenizer)
    total = prompt_tokens + reference_tokens
    drawn: list[tuple[int, int]] = []
    standard = [item.name.startswith(corpus.STDLIB_PREFIX) for item in files]
    for index, ids in enumerate(documents):
        if len(ids) < total or (any(standard) and not standard[index]):
            continue
        starts = line_starts(ids, ends_line)
        starts = starts[starts + total <= len(ids)]
        chosen: list[int] = []
        for start in rng.permutation(starts).tolist():
            if len(chosen) < PROMPTS_PER_FILE and all(abs(start - other) >= total for other in chosen):
                chosen.append(start)
        drawn += [(index, start) for start in chosen]
    if not drawn:
        return []
    windows = np.stack([documents[i][start : start + total] for i, start in drawn])
    fresh = ~copied_runs(windows, train, min(COPY_RUN, total))
    prompts: list[HeldoutPrompt] = []
    for position in rng.permutation(np.flatnonzero(fresh)):
        ids = windows[position].astype(int).tolist()
        prompt = tokenizer.decode(ids[:prompt_tokens], skip_special_tokens=False)
        if tokenizer.encode(prompt, add_special_tokens=False).ids != ids[:prompt_tokens]:
            continue
        item = files[drawn[position][0]]
        prompts.append(
            HeldoutPrompt(
                id=f"{len(prompts):03d}",
                source=item.name,
                license=item.license,
                prompt=prompt,
                prompt_ids=ids[:prompt_tokens],
                reference=tokenizer.decode(ids[prompt_tokens:], skip_special_tokens=False),
            )
        )
        if len(prompts) == count:
            break
    return prompts


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Whether a text ends in an exact repetition: its last 24 tokens, and three periods, have a period of at most 24.

    Small models fall into such loops under greedy decoding. A loop shows nothing of a drafter: any drafter follows it.
    """
    for period in range(1, LOOP_PERIOD + 1):
        span = max(3 * period, LOOP_PERIOD)
        if len(ids) >= span and all(ids[-1 - i] == ids[-1 - i - period] for i in range(span - period)):
            return True
    return False


def prepare(
    sources: Sequence[corpus.SourceFile],
    work: Path,
    *,
    vocab_size: int,
    num_prompts: int,
    prompt_tokens: int,
    reference_tokens: int,
    heldout_tokens: int,
    seed: int,
    tokenizer_sample_bytes: int = 40_000_000,
    num_workers: int | None = None,
    end_id: int = END_ID,
) -> dict:
    """Writes tokenizer.json, train.npy, heldout.npy, heldout.json and corpus.json into `work`.

    A tokenizer.json that is already there is kept, so that a later machine encodes as the first one did.

    Returns:
      Counts for the log.
    """
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(sample_texts(sources, tokenizer_sample_bytes), vocab_size).save(str(path))
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    documents = encode_files(sources, path, num_workers)
    train = join_documents([ids for item, ids in zip(sources, documents, strict=True) if not item.heldout], end_id)
    held = [(item, ids) for item, ids in zip(sources, documents, strict=True) if item.heldout]
    held_tokens = join_documents([ids for _, ids in held], end_id)[:heldout_tokens]
    if len(held_tokens) < 2 * (prompt_tokens + reference_tokens):
        raise ValueError(
            f"corpus: {len(sources)} files give {len(held_tokens)} held-out tokens, too few for a prompt; "
            "give more files or a larger heldout_per_mille"
        )
    np.save(work / "train.npy", train)
    np.save(work / "heldout.npy", held_tokens)
    if not (work / "heldout.json").exists():
        prompts = heldout_prompts(
            [item for item, _ in held],
            [ids for _, ids in held],
            train,
            tokenizer,
            count=num_prompts,
            prompt_tokens=prompt_tokens,
            reference_tokens=reference_tokens,
            seed=seed,
        )
        (work / "heldout.json").write_text(json.dumps([item.to_dict() for item in prompts], indent=1) + "\n")
    packages = corpus.describe(sources)
    num_bytes = sum(row["bytes"] for row in packages)
    summary = {
        "files": len(sources),
        "bytes": num_bytes,
        "train_tokens": len(train),
        "heldout_tokens": len(held_tokens),
        "bytes_per_token": num_bytes / max(1, sum(map(len, documents))),
        "prompts": len(json.loads((work / "heldout.json").read_text())),
    }
    (work / "corpus.json").write_text(json.dumps({"packages": packages, **summary}, indent=1) + "\n")
    return summary
