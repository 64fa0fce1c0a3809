"""Trains the pair that ships with the package, or a drafter for a target of your own.

The shipped pair, on one GPU, in two runs of at most ten minutes:

    python3 examples/train_demo.py --work WORK --stages data,target,indexer \\
        --seconds target=330,indexer=45 --compile own_text,drafter,evaluate --deadline 570 --out OUT
    python3 examples/train_demo.py --work WORK --stages own_text,drafter,evaluate,export \\
        --seconds own_text=80,drafter=400 --deadline 570 --out OUT

A drafter for your own target (an HF-format folder with its tokenizer.json) on your own sources:

    python3 examples/train_demo.py --work WORK --target DIR --corpus DIR \\
        --stages data,own_text,drafter,evaluate,export

The stages and their files are listed in `demo_training/stages.py`. A stage reads what earlier ones left in
WORK, so a run can stop between stages and go on later, on another machine too: `--out` keeps what is needed
in parts of 15.5 MB, `--unpack` puts it back (then run the data stage again: tokens are not kept).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

ALL_STAGES = ("data", "target", "indexer", "own_text", "drafter", "evaluate", "export")
DEFAULT_SECONDS = {"target": 270.0, "indexer": 45.0, "sparse": 0.0, "own_text": 60.0, "drafter": 300.0}
# Compilation, evaluation and saving of one stage, for `--deadline`.
OVERHEAD_SECONDS = {"target": 20, "indexer": 40, "own_text": 20, "drafter": 30, "evaluate": 30, "export": 5}
CLOCKS = {"indexer": ("indexer", "sparse")}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is made")
    parser.add_argument("--stages", default=",".join(ALL_STAGES), help="comma-separated, in order")
    parser.add_argument("--seconds", default="", help="stage=seconds,...; also sparse=seconds (a fine-tune)")
    parser.add_argument("--deadline", type=float, help="seconds this command may take; stages are cut to fit")
    parser.add_argument("--out", type=Path, help="folder for archive parts, renewed after every stage")
    parser.add_argument("--unpack", type=Path, help="folder with archive parts to put into WORK first")
    parser.add_argument("--compile", help="stages of a later command to compile meanwhile (kept in WORK)")
    parser.add_argument("--target", type=Path, help="HF-format folder of your own target")
    parser.add_argument("--corpus", type=Path, help="folder of your own Python sources")
    parser.add_argument("--mask-id", type=int, help="mask token of a drafter for your own target")
    parser.add_argument("--max-corpus-mb", type=float, help="limit of the corpus")
    parser.add_argument("--workers", type=int, help="encoding processes (default: one a core)")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=VALUE", help="replace one size")
    return parser.parse_args(arguments)


def parse_seconds(text: str) -> dict[str, float]:
    """`target=270,indexer=60` over the defaults.

    Raises:
      ValueError: an unknown name or no number.
    """
    seconds = dict(DEFAULT_SECONDS)
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in seconds:
            raise ValueError(f"--seconds: {name!r} is unknown; allowed: {', '.join(seconds)}")
        seconds[name] = float(value)
    return seconds


def fit(seconds: dict[str, float], stages: list[str], deadline: float) -> dict[str, float]:
    """Durations scaled down so that stages and their overhead end within `deadline` seconds from now."""
    names = [name for stage in stages for name in CLOCKS.get(stage, (stage,)) if name in seconds]
    room = deadline - sum(OVERHEAD_SECONDS.get(stage, 0) for stage in stages)
    total = sum(seconds[name] for name in names)
    scale = min(1.0, max(0.05, room / total)) if total > 0 else 1.0
    return {name: value * scale if name in names else value for name, value in seconds.items()}


def kept_files(work: Path) -> list[Path]:
    """What an archive holds: the shipped folder once it is there, else what later stages need."""
    always = [work / name for name in ("corpus.json", "sizes.json", "log.jsonl")]
    if (work / "demo").exists():
        return [*always, work / "evaluation.json", work / "demo"]
    if (work / "drafter").exists():
        always.append(work / "drafter")
    weights = work / "target" if (work / "target").exists() else work / "target.npz"
    return [*always, work / "tokenizer.json", work / "heldout.json", work / "heldout_text.npy", weights]


def main(arguments: list[str] | None = None) -> None:
    """Runs the stages of the command line."""
    options = parse_arguments(arguments)
    started = time.monotonic()
    stages = [stage for stage in options.stages.split(",") if stage]
    unknown = [stage for stage in stages if stage not in ALL_STAGES]
    if unknown:
        raise ValueError(f"--stages: {unknown[0]!r} is unknown; allowed: {', '.join(ALL_STAGES)}")
    seconds = parse_seconds(options.seconds)
    work = options.work
    work.mkdir(parents=True, exist_ok=True)

    # Imported here: encoding processes import this file again and must not start JAX.
    import jax
    from demo_training import export, schedule, tokens
    from demo_training import stages as recipe
    from demo_training.ahead import Ahead
    from demo_training.sizes import DemoSizes

    jax.config.update("jax_compilation_cache_dir", str((work / "compiled").resolve()))
    if options.unpack is not None:
        export.unpack(options.unpack, work)
    sizes = DemoSizes.tiny() if options.tiny else DemoSizes()
    sizes = DemoSizes.from_overrides(sizes, dict(item.split("=", 1) for item in options.size))
    sizes.save(work / "sizes.json")
    log = schedule.Log(work / "log.jsonl")
    log("start", jax=jax.__version__, device=jax.devices()[0].device_kind, stages=stages)

    limits = seconds

    def clock(name: str) -> schedule.Clock:
        return schedule.Clock(limits[name])

    run = recipe.Run(
        work=work,
        sizes=sizes,
        clock=clock,
        log=log,
        corpus_folder=options.corpus,
        max_corpus_bytes=None if options.max_corpus_mb is None else int(options.max_corpus_mb * 1e6),
        num_workers=options.workers,
        ahead=Ahead(log),
    )
    if options.target is not None:
        run = use_own_target(run, options.target, options.mask_id, tokens.MASK_TOKEN)
    later = [stage for stage in (options.compile or "").split(",") if stage]
    for stage in [*stages, *later]:
        for name, function in recipe.compilations(run, stage).items():
            run.ahead.submit(name, function)
    failed = None
    for i, stage in enumerate(stages):
        if options.deadline is not None:
            limits = fit(seconds, stages[i:], options.deadline - (time.monotonic() - started))
        begin = time.monotonic()
        try:
            recipe.STAGES[stage](run)
        except Exception as error:
            log(stage, error=f"{type(error).__name__}: {error}"[:500])
            failed = error
            # Only the export can do without what an evaluation gives.
            if stage != "evaluate":
                break
        if options.out is not None:
            export.pack(kept_files(work), work, options.out)
            shutil.copyfile(work / "log.jsonl", options.out / "log.jsonl")
        log(f"{stage} stage", wall_seconds=time.monotonic() - begin)
    run.ahead.close()
    if failed is not None:
        raise failed


def use_own_target(run, folder: Path, mask_id: int | None, mask_token: str):
    """The run with the user's own target copied into the work folder.

    The mask token is `mask_id`, else the tokenizer's own mask token, else the last row of the embedding.
    """
    import tokenizers

    from ddtree_jax.models import Glm5Config

    shutil.copytree(folder, run.work / "target", dirs_exist_ok=True)
    shutil.copyfile(folder / "tokenizer.json", run.work / "tokenizer.json")
    config = Glm5Config.from_hf(json.loads((folder / "config.json").read_text()))
    if mask_id is None:
        mask_id = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(mask_token)
    if mask_id is None:
        mask_id = config.vocab_size - 1
    end_id = config.eos_token_ids[0] if config.eos_token_ids else 0
    return dataclasses.replace(run, own_target=True, mask_id=mask_id, end_id=end_id)


if __name__ == "__main__":
    main()
