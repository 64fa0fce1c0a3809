"""The stages of the recipe, in order. Each reads files of the work folder and writes its own; any can be run again.

| stage | reads | writes |
|---|---|---|
| data | sources on this machine | tokenizer.json, train.npy, heldout.npy, heldout.json, corpus.json |
| target | train.npy | target.npz (float32) |
| indexer | target.npz | target/ (HF format, bfloat16): what every later stage uses |
| own_text | target/, train.npy, heldout.json | own_text.npz, heldout_text.npy |
| drafter | target/, own_text.npz, heldout_text.npy | drafter/ (HF format, bfloat16) |
| evaluate | target/, drafter/, heldout_text.npy | evaluation.json |
| export | all of them | demo/ |
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

from ddtree_jax import models
from ddtree_jax.models.config import DFlashConfig, Glm5Config

from . import corpus, drafter, export, indexer, modules, own_text, schedule, simulate, target, tokens
from .schedule import Clock, Log
from .sizes import DemoSizes


@dataclasses.dataclass(frozen=True)
class Run:
    """What every stage gets.

    Attributes:
      work: folder of the files above.
      sizes: of the pair.
      clock: makes the clock of a stage by its name.
      log: of the run.
      corpus_folder: the user's own sources instead of the machine's.
      max_corpus_bytes: limit of the corpus.
      num_workers: encoding processes (None: one a core, 0: this one).
      end_id: end-of-text token.
      mask_id: token of a drafter's masked rows.
      own_target: whether the target is the user's own, already in `work/target`.
      compiled_target: future of `target.compile_ahead`, or None.
    """

    work: Path
    sizes: DemoSizes
    clock: Callable[[str], Clock]
    log: Log
    corpus_folder: Path | None = None
    max_corpus_bytes: int | None = None
    num_workers: int | None = None
    end_id: int = tokens.END_ID
    mask_id: int = tokens.MASK_ID
    own_target: bool = False
    compiled_target: Future | None = None

    def target_config(self) -> Glm5Config:
        """The target's config: that of `work/target` if the target is the user's own."""
        if self.own_target:
            return Glm5Config.from_hf(json.loads((self.work / "target" / "config.json").read_text()))
        return Glm5Config.from_hf(self.sizes.target_hf_config(self.end_id))

    def drafter_config(self) -> DFlashConfig:
        """The drafter's config."""
        values = self.target_config().to_hf() if self.own_target else None
        return DFlashConfig.from_hf(self.sizes.drafter_hf_config(self.end_id, self.mask_id, values))

    def load_target(self) -> models.Target:
        """The rounded target as float32 values, layers unrolled: a loop over layers would copy the caches."""
        return models.load_target(self.work / "target", dtype="float32", scan=False)

    def prompts(self) -> np.ndarray:
        """Held-out prompts int32[P, prompt length]."""
        entries = json.loads((self.work / "heldout.json").read_text())
        return np.asarray([entry["prompt_ids"] for entry in entries], np.int32)


def run_data(run: Run) -> None:
    """Reads the sources, trains the tokenizer and encodes."""
    sizes = run.sizes
    share = sizes.heldout_per_mille
    if run.corpus_folder is None:
        found = corpus.installed_sources(share)
    else:
        found = corpus.folder_sources(run.corpus_folder, share)
    files = corpus.select(found, run.max_corpus_bytes)
    run.log("data", files=len(files))
    summary = tokens.prepare(
        files,
        run.work,
        vocab_size=sizes.vocab_size,
        num_prompts=sizes.num_prompts,
        prompt_tokens=sizes.prompt_tokens,
        reference_tokens=sizes.reference_tokens,
        heldout_tokens=sizes.heldout_tokens,
        seed=sizes.seed,
        num_workers=run.num_workers,
        end_id=run.end_id,
    )
    run.log("data", summary=True, **summary)


def run_target(run: Run) -> None:
    """Trains the target densely and reports its held-out loss."""
    sizes, config = run.sizes, run.target_config()
    graphdef, params = modules.new_target(config, sizes.seed)
    train = np.load(run.work / "train.npy")
    batches = modules.windows(train, sizes.target_context + 1, sizes.target_batch, sizes.seed + 1)
    path = run.work / "target.npz"
    clock = run.clock("target")
    chunk = None if run.compiled_target is None else run.compiled_target.result()
    params = target.train(
        sizes, config, graphdef, params, batches, clock, run.log, checkpoint=path, chunk=chunk
    )
    schedule.save_tree(path, params)
    heldout = np.load(run.work / "heldout.npy")
    loss = target.heldout_loss(
        graphdef, params, heldout, length=sizes.target_context, batch=sizes.target_batch, sparse=False
    )
    run.log("target", summary=True, seconds=clock.elapsed, heldout_loss=loss, perplexity=float(np.exp(loss)))


def run_indexer(run: Run) -> None:
    """Trains the indexers, compares dense and sparse held-out losses, rounds to bfloat16 and saves the target."""
    sizes, config = run.sizes, run.target_config()
    graphdef, params = modules.new_target(config, sizes.seed)
    params = schedule.load_tree(run.work / "target.npz", params)
    train, heldout = np.load(run.work / "train.npy"), np.load(run.work / "heldout.npy")
    clock = run.clock("indexer")
    batches = modules.windows(train, sizes.target_context, sizes.indexer_batch, sizes.seed + 2)
    params = indexer.train(sizes, graphdef, params, batches, clock, run.log)

    tuning = run.clock("sparse")
    if tuning.seconds > 0:
        # A short fine-tune under the restriction lets the network make up for what the indexers leave out.
        batches = modules.windows(train, sizes.target_context + 1, sizes.sparse_batch, sizes.seed + 7)
        params = target.train(
            sizes,
            config,
            graphdef,
            params,
            batches,
            tuning,
            run.log,
            sparse=True,
            peak=sizes.sparse_learning_rate,
            stage="sparse",
        )
    params = modules.round_to_bfloat16(params)
    models.save_target(models.Target(config, graphdef, params), run.work / "target")

    measure = functools.partial(target.heldout_loss, params=params, tokens=heldout, batch=sizes.indexer_batch)
    losses = {}
    for length in sorted({sizes.target_context, max(sizes.target_context // 4, 2 * sizes.index_topk)}):
        losses[f"dense_{length}"] = measure(graphdef, length=length, sparse=False)
        for topk in (sizes.index_topk // 2, sizes.index_topk, sizes.index_topk * 2):
            if topk < length:
                changed, _ = modules.abstract_target(dataclasses.replace(config, index_topk=topk))
                losses[f"top{topk}_{length}"] = measure(changed, length=length, sparse=True)
    run.log("indexer", summary=True, seconds=clock.elapsed, sparse_seconds=tuning.elapsed, **losses)


def run_own_text(run: Run) -> None:
    """Lets the target write the drafter's training text and the held-out continuations."""
    loaded = run.load_target()
    train = np.load(run.work / "train.npy")
    ends_line = tokens.newline_ids(tokenizers.Tokenizer.from_file(str(run.work / "tokenizer.json")))
    ends_line = np.resize(ends_line, loaded.config.vocab_size)
    clock = run.clock("own_text")
    texts, heldout = own_text.write_texts(
        run.sizes, loaded.graphdef, loaded.params, train, ends_line, run.prompts(), clock, run.log
    )
    np.savez(run.work / "own_text.npz", **texts)
    np.save(run.work / "heldout_text.npy", heldout)
    new = int(np.sum(texts["tokens"].shape[1] - texts["prompt_lengths"]))
    run.log("own_text", summary=True, seconds=clock.elapsed, sequences=len(texts["tokens"]), new_tokens=new)


def run_drafter(run: Run) -> None:
    """Trains the drafter on the target's own text."""
    sizes, loaded, config = run.sizes, run.load_target(), run.drafter_config()
    graphdef, params = modules.new_drafter(config, sizes.seed + 8, loaded.config.hidden_size)
    texts = dict(np.load(run.work / "own_text.npz"))
    check = simulate.make_check(
        loaded.graphdef,
        loaded.params,
        graphdef,
        np.load(run.work / "heldout_text.npy")[:64],
        prompt_length=sizes.prompt_tokens,
        new_tokens=sizes.reference_tokens,
        end_ids=[run.end_id],
    )
    clock = run.clock("drafter")
    params = drafter.train(
        sizes,
        loaded.graphdef,
        loaded.params,
        graphdef,
        params,
        texts,
        clock,
        run.log,
        check=check,
        check_every=min(60.0, clock.seconds / 2),
        checkpoint=run.work / "drafter.npz",
    )
    params = modules.round_to_bfloat16(params)
    models.save_drafter(models.Drafter(config, graphdef, params), loaded, run.work / "drafter")
    run.log("drafter", summary=True, seconds=clock.elapsed, **check(params))


def run_evaluate(run: Run) -> None:
    """Simulates acceptance of the chain and of trees on the held-out prompts and prints sample texts."""
    sizes, loaded = run.sizes, run.load_target()
    drafted = models.load_drafter(run.work / "drafter", loaded, dtype="float32")
    texts = np.load(run.work / "heldout_text.npy")
    cast = jax.jit(functools.partial(modules.cast, dtype=modules.compute_dtype()))
    scorer = simulate.make_scorer(
        loaded.graphdef,
        drafted.graphdef,
        prompt_length=sizes.prompt_tokens,
        new_tokens=sizes.reference_tokens,
        budgets=sizes.tree_budgets,
    )
    rounds = simulate.simulate(
        scorer,
        cast(loaded.params),
        cast(drafted.params),
        texts,
        prompt_length=sizes.prompt_tokens,
        new_tokens=sizes.reference_tokens,
        end_ids=[run.end_id],
    )
    acceptance = {name: simulate.summary(values) for name, values in rounds.items()}
    tokenizer = tokenizers.Tokenizer.from_file(str(run.work / "tokenizer.json"))
    end = sizes.prompt_tokens + sizes.reference_tokens
    samples = [
        {
            "prompt": tokenizer.decode(row[: sizes.prompt_tokens].tolist(), skip_special_tokens=False),
            "greedy": tokenizer.decode(row[sizes.prompt_tokens : end].tolist(), skip_special_tokens=False),
        }
        for row in texts[:8]
    ]
    content = {"prompts": len(texts), "acceptance": acceptance, "rounds": rounds, "samples": samples}
    (run.work / "evaluation.json").write_text(json.dumps(content) + "\n")
    for sample in samples[:4]:
        print("-" * 80, sample["prompt"][-300:], ">" * 20, sample["greedy"], sep="\n", flush=True)
    means = {name: values["mean"] for name, values in acceptance.items()}
    weighted = {f"{name}_token_weighted": values["token_weighted"] for name, values in acceptance.items()}
    run.log("evaluate", summary=True, prompts=len(texts), **means, **weighted)


def run_export(run: Run) -> None:
    """Puts the shipped folder together."""
    sizes, work = run.sizes, run.work
    folder = work / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "target", folder / "target")
    shutil.copytree(work / "drafter", folder / "drafter")
    tokenizer = tokenizers.Tokenizer.from_file(str(work / "tokenizer.json"))
    end_token = tokenizer.id_to_token(run.end_id) or tokens.END_TOKEN
    config, draft_config = run.target_config(), run.drafter_config()
    if not run.own_target:
        export.write_tokenizer(
            work / "tokenizer.json", folder / "target", end_token, config.max_position_embeddings
        )
    shutil.copyfile(work / "heldout.json", folder / "heldout.json")
    evaluation = (
        json.loads((work / "evaluation.json").read_text()) if (work / "evaluation.json").exists() else {}
    )
    facts: dict[str, Any] = json.loads((work / "corpus.json").read_text())
    loaded = run.load_target()
    drafted = models.load_drafter(folder / "drafter", loaded, dtype="float32")
    facts |= {
        "target_parameters": sum(x.size for x in jax.tree.leaves(loaded.params)) / 1e6,
        "drafter_parameters": sum(x.size for x in jax.tree.leaves(drafted.params)) / 1e6,
        "num_layers": config.num_hidden_layers,
        "experts": config.n_routed_experts,
        "top": config.num_experts_per_tok,
        "full": ", ".join(str(i) for i, kind in enumerate(config.indexer_types) if kind == "full"),
        "index_topk": config.index_topk,
        "draft_layers": draft_config.num_hidden_layers,
        "block": draft_config.block_size,
        "taps": ", ".join(map(str, draft_config.target_layer_ids)),
        "megabytes": facts["bytes"] / 1e6,
        "train_tokens": facts["train_tokens"] / 1e6,
        "copy_run": tokens.COPY_RUN,
        "package_table": export.package_table(facts["packages"]),
        "seed": sizes.seed,
        "stage_table": export.stage_table(run.log.records()),
        "new_tokens": sizes.reference_tokens,
        "evaluated": evaluation.get("prompts", 0),
        "acceptance_table": export.acceptance_table(evaluation.get("acceptance", {})),
    }
    (folder / "README.md").write_text(export.model_card(facts))
    run.log("export", summary=True, megabytes=export.folder_bytes(folder) / 1e6)


STAGES: dict[str, Callable[[Run], None]] = {
    "data": run_data,
    "target": run_target,
    "indexer": run_indexer,
    "own_text": run_own_text,
    "drafter": run_drafter,
    "evaluate": run_evaluate,
    "export": run_export,
}
