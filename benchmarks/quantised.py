"""Perplexity on the shipped held-out text of targets beside each other in one run, and how often their choices agree.

python benchmarks/quantised.py                                    # the shipped target, bfloat16 weights and NVFP4
python benchmarks/quantised.py DIR DIR ...                        # the first one is what the others are held against
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.engine import demo_folder
from ddtree_jax.models import load_target, target_logits
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.tokenizer import Tokenizer

BATCH = 16


def held_out_rows() -> tuple[np.ndarray, np.ndarray]:
    """(token ids int32[prompts, T], lengths): each held-out prompt with its true continuation."""
    folder = demo_folder()
    tokenizer = Tokenizer.from_folder(folder / "target")
    items = json.loads((folder / "heldout.json").read_text(encoding="utf-8"))
    rows = [tokenizer.encode(item["prompt"] + item["reference"]) for item in items]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    return ids, np.array([len(tokens) for tokens in rows])


def measure(folder: pathlib.Path, ids: np.ndarray, lengths: np.ndarray) -> tuple[float, np.ndarray, int]:
    """(mean loss in nats, greedy choices, bytes of parameters) of one target."""
    target = load_target(folder)
    total, choices = 0.0, []
    scored = np.arange(ids.shape[1] - 1)[None] < lengths[:, None] - 1
    for at in range(0, len(ids), BATCH):
        logits = target_logits(target, ids[at : at + BATCH])[:, :-1]
        losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(
            logits, jnp.asarray(ids[at : at + BATCH, 1:, None]), axis=-1
        ).squeeze(-1)
        total += float(np.asarray(losses)[scored[at : at + BATCH]].sum())
        choices.append(np.asarray(jnp.argmax(logits, axis=-1))[scored[at : at + BATCH]])
    num_bytes = sum(leaf.nbytes for leaf in flat_leaves(target.params).values())
    return total / scored.sum(), np.concatenate(choices), num_bytes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    shipped = [demo_folder() / "target", demo_folder() / "target-nvfp4"]
    folders = parser.parse_args().folders or shipped
    ids, lengths = held_out_rows()
    tokens = int((lengths - 1).sum())
    print(f"{len(ids)} held-out texts, {tokens} tokens, {jax.devices()[0].device_kind}")
    print(f"{'target':32} {'perplexity':>10} {'change':>8} {'same choice':>12} {'parameters':>12}")
    first = None
    for folder in folders:
        loss, choices, num_bytes = measure(folder, ids, lengths)
        first = first or (loss, choices)
        change, same = 100 * (np.exp(loss - first[0]) - 1), 100 * np.mean(choices == first[1])
        print(
            f"{folder.name:32} {np.exp(loss):10.4f} {change:+7.2f}% {same:11.2f}% {num_bytes / 1e6:9.1f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
