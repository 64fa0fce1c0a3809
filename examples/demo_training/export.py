"""The shipped folder: pair, tokenizer, held-out prompts and model card; and archives in parts."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PART_BYTES = 15_500_000
PART_NAME = "work.tar."

CARD = """\
# The demo pair

A miniature GLM-5 target ({target_parameters:.1f} M parameters) and a DFlash drafter for it
({drafter_parameters:.1f} M), trained from random weights in JAX by `examples/train_demo.py` on one device
({device}). They write Python in the style of their corpus; they know nothing and follow no instructions.
They exist so that tree speculative decoding can be run, measured and tested anywhere, in seconds.

- `target/`: GlmMoeDsaForCausalLM with {num_layers} layers, MLA, {experts} experts (top {top}) and a
  shared one, DSA indexers in layers {full}, `index_topk` {index_topk}.
- `target-nvfp4/`: the same with its routed experts as NVFP4 (`ddtree-jax convert --format nvfp4`).
- `chat_template.jinja` in both target folders: the contents of a conversation's messages, joined by a line break, with
  no roles and nothing after the last. A chat with this pair is one text that it goes on with.
- `drafter/`: {drafter_architecture} with {draft_layers} layers, block {block}, taps after layers {taps}.
- `heldout.json`: {prompts} prompts from held-out files: `id`, `source`, `license`, `prompt`,
  `prompt_ids`, `reference` (how the file goes on).

Weights are bfloat16 (router weights and selection biases float32), under the licence of this project. The
prompts are quotations under the licence that each names.

## Data
{files} Python files ({megabytes:.0f} MB, {train_tokens:.1f} M training tokens, {bytes_per_token:.2f}
bytes a token) found on the training machine: the standard library and packages of an allow-list of
permissive licences. Left out: exact duplicates, vendored folders, files outside 200 B - 400 kB, files
with lines over 2000 characters. {heldout_share} % of the files are held out by a hash of their path. A
held-out prompt shares no run of {copy_run} tokens with the training text, its continuation included;
shorter copies remain across the split.

{package_table}

## Training
Seed {seed}. The schedule follows the clock, so a second run does not give the same weights bit for bit.
Losses are in nats a token on held-out files; `topK_T` is the loss over contexts of T tokens when each
token attends to K, `dense_T` when it attends to all.

| stage | what was done |
|---|---|
{stage_table}

## Acceptance on the held-out prompts
Greedy, {new_tokens} new tokens, simulated with the exported weights in the dtype of the training machine
(`examples/demo_training/simulate.py`): mean acceptance lengths, the tokens emitted per pass of the target.
Small models loop under greedy decoding, and any drafter follows a loop; prompts whose continuation ends in one
are left out of `heldout.json`.

The {evaluated} prompts of `heldout.json`:

| | mean over prompts | tokens / rounds | median prompt |
|---|---|---|---|
{acceptance_table}

All {all_prompts} prompts drawn, loops included:

| | mean over prompts | tokens / rounds | median prompt |
|---|---|---|---|
{all_acceptance_table}
"""


def package_table(packages: Sequence[dict]) -> str:
    """Markdown: packages with licence, files and size."""
    lines = ["| package | licence | files | MB |", "|---|---|---|---|"]
    for row in packages:
        lines.append(f"| {row['package']} | {row['license']} | {row['files']} | {row['bytes'] / 1e6:.1f} |")
    return "\n".join(lines)


def acceptance_table(acceptance: dict[str, dict[str, float]]) -> str:
    """Markdown rows, the chain first, then trees by budget."""
    names = sorted(acceptance, key=lambda name: int(name.removeprefix("ddtree") or 0) if name != "dflash" else -1)
    rows = []
    for name in names:
        values = acceptance[name]
        label = name if name == "dflash" else f"ddtree, budget {name.removeprefix('ddtree')}"
        rows.append(f"| {label} | {values['mean']:.2f} | {values['token_weighted']:.2f} | {values['median']:.2f} |")
    return "\n".join(rows)


def stage_table(records: Iterable[dict]) -> str:
    """Markdown rows from the last log line of each stage that marks its end (`"summary": true`)."""
    last = {record["stage"]: record for record in records if record.get("summary")}
    rows = []
    for stage, record in last.items():
        values = {k: v for k, v in record.items() if k not in ("stage", "at", "summary")}
        rows.append(f"| {stage} | {', '.join(f'{k} {v}' for k, v in values.items())} |")
    return "\n".join(rows)


# A model that only continues text has no roles: the messages are one text, each on lines of its own.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}
{%- endfor -%}
"""


def write_tokenizer(tokenizer: Path, folder: Path, end_token: str, max_length: int) -> None:
    """Copies tokenizer.json and writes what HF tools and gateways read beside it."""
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_token,
        "pad_token": end_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def model_card(facts: dict[str, Any]) -> str:
    """README.md of the folder."""
    return CARD.format(**facts)


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def pack(paths: Iterable[Path], root: Path, out: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Writes files and folders below `root` as one tar archive cut into parts of at most `part_bytes`.

    Parts of an earlier call in `out` are replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"{PART_NAME}*"):
        old.unlink()
    archive = out / "archive.partial"
    with tarfile.open(archive, "w") as tar:
        for path in paths:
            if path.exists():
                tar.add(path, arcname=path.relative_to(root).as_posix())
    parts = []
    with archive.open("rb") as file:
        while data := file.read(part_bytes):
            part = out / f"{PART_NAME}{len(parts):02d}"
            part.write_bytes(data)
            parts.append(part)
    archive.unlink()
    return parts


def unpack(parts: Path, root: Path) -> None:
    """Joins the parts that `pack` wrote into `parts` and extracts them below `root`.

    Raises:
      FileNotFoundError: there are no parts.
    """
    found = sorted(parts.glob(f"{PART_NAME}*"))
    if not found:
        raise FileNotFoundError(f"{parts}: no {PART_NAME}* files")
    root.mkdir(parents=True, exist_ok=True)
    archive = root / "archive.partial"
    with archive.open("wb") as file:
        for part in found:
            file.write(part.read_bytes())
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
    archive.unlink()
