"""The stages of the recipe, in order. Each reads files of the work folder and writes its own.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

from ddtree_jax import models
from ddtree_jax.checkpoint import MAX_SHARD_BYTES
from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.quantise import quantise_target

from . import corpus, drafter, export, indexer, modules, own_text, schedule, simulate, target, tokens
from .ahead import Ahead
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
      ahead: compilations in the background, by the names of `compilations`.
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
    ahead: Ahead | None = None

    def target_config(self) -> Glm5Config:
        """The target's config: that of `work/target` if the target is the user's own."""
        if self.own_target:
            return Glm5Config.from_hf(json.loads((self.work / "target" / "config.json").read_text()))
        return Glm5Config.from_hf(self.sizes.target_hf_config(self.end_id))

    def drafter_config(self) -> DFlashConfig:
        """The drafter's config."""
        values = self.target_config().to_hf() if self.own_target else None
        return DFlashConfig.from_hf(self.sizes.drafter_hf_config(self.end_id, self.mask_id, values))

    def compiled(self, name: str) -> Any:
        """A function that was compiled in the background, or None."""
        return None if self.ahead is None else self.ahead.get(name)

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
    graphdef, params = run.compiled("target_start") or modules.new_target(config, sizes.seed)
    train = np.load(run.work / "train.npy")
    batches = modules.windows(train, sizes.target_context + 1, sizes.target_batch, sizes.seed + 1)
    path = run.work / "target.npz"
    clock = run.clock("target")
    params = target.train(
        sizes,
        config,
        graphdef,
        params,
        batches,
        clock,
        run.log,
        checkpoint=path,
        chunk=run.compiled("target"),
    )
    seconds = clock.elapsed
    schedule.save_tree(path, params)
    loss = target.heldout_loss(
        run.compiled("heldout") or target.make_evaluate(graphdef, sparse=False),
        modules.to_compute(params),
        np.load(run.work / "heldout.npy"),
        length=sizes.target_context,
        batch=sizes.indexer_batch,
    )
    run.log("target", summary=True, seconds=seconds, heldout_loss=loss, perplexity=float(np.exp(loss)))


def run_indexer(run: Run) -> None:
    """Trains the indexers, rounds to bfloat16, saves the target, compares dense and sparse losses."""
    sizes, config = run.sizes, run.target_config()
    graphdef, params = modules.abstract_target(config)
    params = schedule.load_tree(run.work / "target.npz", params)
    train, heldout = np.load(run.work / "train.npy"), np.load(run.work / "heldout.npy")
    clock = run.clock("indexer")
    batches = modules.windows(train, sizes.target_context, sizes.indexer_batch, sizes.seed + 2)
    params = indexer.train(sizes, graphdef, params, batches, clock, run.log, step=run.compiled("indexer"))

    seconds, tuning = clock.elapsed, run.clock("sparse")
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
            chunk=run.compiled("sparse"),
        )
    sparse_seconds = tuning.elapsed
    params = modules.round_to_bfloat16(params)
    models.save_target(models.Target(config, graphdef, params), run.work / "target")

    # Measured with the weights as saved; layers in a loop, because every variant is compiled for a few
    # batches only.
    loaded = models.load_target(run.work / "target", dtype="float32")
    compute = modules.to_compute(loaded.params)
    short = max(sizes.target_context // 4, 2 * sizes.index_topk)
    variants = [("dense", None, sizes.target_context), ("dense", None, short)]
    variants += [(f"top{k}", k, n) for n, k in sizes.sparse_checks]

    def measure(variant: tuple[str, int | None, int]) -> float:
        _, topk, length = variant
        changed = loaded.config if topk is None else dataclasses.replace(loaded.config, index_topk=topk)
        changed_graphdef, _ = modules.abstract_target(changed, scan=True)
        evaluate = target.make_evaluate(changed_graphdef, sparse=topk is not None)
        return target.heldout_loss(evaluate, compute, heldout, length=length, batch=sizes.indexer_batch)

    # In threads: compiling takes longer than measuring.
    with ThreadPoolExecutor(len(variants)) as pool:
        values = list(pool.map(measure, variants))
    losses = {f"{name}_{length}": value for (name, _, length), value in zip(variants, values, strict=True)}
    run.log("indexer", summary=True, seconds=seconds, sparse_seconds=sparse_seconds, **losses)


def run_own_text(run: Run) -> None:
    """Lets the target write the drafter's training text and the held-out continuations."""
    loaded = run.load_target()
    train = np.load(run.work / "train.npy")
    ends_line = tokens.newline_ids(tokenizers.Tokenizer.from_file(str(run.work / "tokenizer.json")))
    ends_line = np.resize(ends_line, loaded.config.vocab_size)
    clock = run.clock("own_text")
    texts, heldout = own_text.write_texts(
        run.sizes,
        loaded.graphdef,
        loaded.params,
        train,
        ends_line,
        run.prompts(),
        clock,
        run.log,
        compiled=lambda length: run.compiled(f"writer{length}"),
    )
    np.savez(run.work / "own_text.npz", **texts)
    np.save(run.work / "heldout_text.npy", heldout)
    new = int(np.sum(texts["tokens"].shape[1] - texts["prompt_lengths"]))
    run.log("own_text", summary=True, seconds=clock.elapsed, sequences=len(texts["tokens"]), new_tokens=new)


def run_drafter(run: Run) -> None:
    """Trains the drafter on the target's own text."""
    sizes, loaded, config = run.sizes, run.load_target(), run.drafter_config()
    start = run.compiled("drafter_start")
    graphdef, params = start or modules.new_drafter(config, sizes.seed + 8, loaded.config.hidden_size)
    texts = dict(np.load(run.work / "own_text.npz"))
    span = {"prompt_length": sizes.prompt_tokens, "new_tokens": sizes.reference_tokens}
    scorer = run.compiled("check") or simulate.make_scorer(loaded.graphdef, graphdef, budgets=(), **span)
    heldout = np.load(run.work / "heldout_text.npy")[:64]
    check = simulate.make_check(scorer, loaded.params, heldout, end_ids=[run.end_id], batch=sizes.check_batch, **span)
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
        chunk=run.compiled("drafter"),
    )
    seconds = clock.elapsed
    params = modules.round_to_bfloat16(params)
    models.save_drafter(models.Drafter(config, graphdef, params), loaded, run.work / "drafter")
    run.log("drafter", summary=True, seconds=seconds, **check(params))


def run_evaluate(run: Run) -> None:
    """Simulates acceptance of the chain and of trees on the held-out prompts and prints sample texts."""
    sizes, loaded = run.sizes, run.load_target()
    drafted = models.load_drafter(run.work / "drafter", loaded, dtype="float32")
    texts = np.load(run.work / "heldout_text.npy")
    span = {"prompt_length": sizes.prompt_tokens, "new_tokens": sizes.reference_tokens}
    scorer = run.compiled("evaluate") or simulate.make_scorer(
        loaded.graphdef, drafted.graphdef, budgets=sizes.tree_budgets, **span
    )
    rounds = simulate.simulate(
        scorer,
        modules.to_compute(loaded.params),
        modules.to_compute(drafted.params),
        texts,
        end_ids=[run.end_id],
        batch=sizes.evaluate_batch,
        **span,
    )
    looping = [tokens.ends_in_loop(row[sizes.prompt_tokens :].tolist()) for row in texts]
    chosen = [i for i, loops in enumerate(looping) if not loops] or list(range(len(texts)))
    acceptance = {name: simulate.summary([values[i] for i in chosen]) for name, values in rounds.items()}
    everything = {name: simulate.summary(values) for name, values in rounds.items()}
    tokenizer = tokenizers.Tokenizer.from_file(str(run.work / "tokenizer.json"))
    end = sizes.prompt_tokens + sizes.reference_tokens
    samples = [
        {
            "prompt": tokenizer.decode(row[: sizes.prompt_tokens].tolist(), skip_special_tokens=False),
            "greedy": tokenizer.decode(row[sizes.prompt_tokens : end].tolist(), skip_special_tokens=False),
        }
        for row in texts[:8]
    ]
    content = {
        "prompts": len(chosen),
        "acceptance": acceptance,
        "all_prompts": len(texts),
        "all_acceptance": everything,
        "looping": looping,
        "rounds": rounds,
        "samples": samples,
    }
    (run.work / "evaluation.json").write_text(json.dumps(content) + "\n")
    for sample in samples[:4]:
        print("-" * 80, sample["prompt"][-300:], ">" * 20, sample["greedy"], sep="\n", flush=True)
    means = {name: values["mean"] for name, values in acceptance.items()}
    weighted = {f"{name}_token_weighted": values["token_weighted"] for name, values in acceptance.items()}
    run.log("evaluate", summary=True, prompts=len(chosen), **means, **weighted)


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
        export.write_tokenizer(work / "tokenizer.json", folder / "target", end_token, config.max_position_embeddings)
        quantise_target(folder / "target", folder / "target-nvfp4", max_shard_bytes=MAX_SHARD_BYTES)
    evaluation = json.loads((work / "evaluation.json").read_text()) if (work / "evaluation.json").exists() else {}
    prompts = json.loads((work / "heldout.json").read_text())
    looping = evaluation.get("looping", [False] * len(prompts))
    published = [item for item, loops in zip(prompts, looping, strict=True) if not loops] or prompts
    (folder / "heldout.json").write_text(json.dumps(published, indent=1) + "\n")
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
        "drafter_architecture": draft_config.to_hf()["architectures"][0],
        "draft_layers": draft_config.num_hidden_layers,
        "block": draft_config.block_size,
        "taps": ", ".join(map(str, draft_config.target_layer_ids)),
        "device": [r["device"] for r in run.log.records() if r["stage"] == "start"][-1],
        "megabytes": facts["bytes"] / 1e6,
        "heldout_share": sizes.heldout_per_mille / 10,
        "train_tokens": facts["train_tokens"] / 1e6,
        "copy_run": tokens.COPY_RUN,
        "package_table": export.package_table(facts["packages"]),
        "seed": sizes.seed,
        "stage_table": export.stage_table(run.log.records()),
        "new_tokens": sizes.reference_tokens,
        "evaluated": evaluation.get("prompts", 0),
        "acceptance_table": export.acceptance_table(evaluation.get("acceptance", {})),
        "all_prompts": evaluation.get("all_prompts", 0),
        "all_acceptance_table": export.acceptance_table(evaluation.get("all_acceptance", {})),
        "prompts": len(published),
    }
    (folder / "README.md").write_text(export.model_card(facts))
    run.log("export", summary=True, megabytes=export.folder_bytes(folder) / 1e6)


def compilations(run: Run, stage: str) -> dict[str, Callable[[], Any]]:
    """What a stage needs that takes long to compile, by name; each works from shapes alone."""
    sizes = run.sizes
    if stage in ("data", "export"):
        return {}
    config, draft_config = run.target_config(), run.drafter_config()
    span = {"prompt_length": sizes.prompt_tokens, "new_tokens": sizes.reference_tokens}
    score = functools.partial(simulate.compile_scorer, config, draft_config, length=sizes.own_length, **span)
    dtype = np.uint16 if config.vocab_size <= 1 << 16 else np.uint32
    if stage == "target":
        return {
            "target": functools.partial(target.compile_chunk, sizes, config),
            "target_start": functools.partial(modules.new_target, config, sizes.seed),
            "heldout": functools.partial(target.compile_evaluate, sizes, config),
        }
    if stage == "indexer":
        jobs = {"indexer": functools.partial(indexer.compile_step, sizes, config)}
        if run.clock("sparse").seconds > 0:
            jobs["sparse"] = functools.partial(target.compile_chunk, sizes, config, sparse=True)
        return jobs
    if stage == "own_text":
        lengths = {sizes.prompt_tokens, *sizes.own_prompt_lengths}
        return {f"writer{n}": functools.partial(own_text.compile_writer, sizes, config, n) for n in sorted(lengths)}
    if stage == "drafter":
        return {
            "drafter": functools.partial(drafter.compile_chunk, sizes, config, draft_config, dtype),
            "drafter_start": functools.partial(modules.new_drafter, draft_config, sizes.seed + 8, config.hidden_size),
            "check": functools.partial(score, batch=sizes.check_batch, budgets=()),
        }
    return {"evaluate": functools.partial(score, batch=sizes.evaluate_batch, budgets=sizes.tree_budgets)}


STAGES: dict[str, Callable[[Run], None]] = {
    "data": run_data,
    "target": run_target,
    "indexer": run_indexer,
    "own_text": run_own_text,
    "drafter": run_drafter,
    "evaluate": run_evaluate,
    "export": run_export,
}
