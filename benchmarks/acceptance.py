"""Acceptance lengths on all held-out prompts, greedy, every algorithm, and whether every output equals that of none.

python benchmarks/acceptance.py                      # the prompts that ship
python benchmarks/acceptance.py --loops              # the ones left out of them, too: continuations that loop
"""

import argparse
import pathlib
import statistics

import jax

import ddtree_jax
from ddtree_jax.bench import held_out_prompts

LOOPING = pathlib.Path(__file__).with_name("heldout_looping.json")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loops", action="store_true", help="add the prompts whose greedy continuation ends in a loop")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--budgets", default="4,8,16,32,64,128")
    options = parser.parse_args()
    prompts = held_out_prompts() + (held_out_prompts(str(LOOPING)) if options.loops else [])
    engine = ddtree_jax.load("demo")
    device = jax.devices()[0].device_kind
    print(f"{len(prompts)} prompts, {options.max_new_tokens} new tokens, greedy, {engine.target.dtype}, {device}")
    print(f"{'':12} {'mean':>6} {'by token':>9} {'median':>7} {'identical':>10}")
    rows = [("none", 0), ("dflash", 0), *(("ddtree", int(b)) for b in options.budgets.split(","))]
    plain: list[list[int]] = []
    for algorithm, budget in rows:
        results = ddtree_jax.generate(engine, prompts, options.max_new_tokens, algorithm, budget)
        plain = plain or [r.token_ids for r in results]
        means = [r.stats.mean_acceptance_length for r in results if r.stats.num_rounds]
        by_token = sum(sum(r.stats.acceptance_lengths) for r in results) / sum(r.stats.num_rounds for r in results)
        same = sum(r.token_ids == p for r, p in zip(results, plain, strict=True))
        name = algorithm if algorithm != "ddtree" else f"ddtree {budget}"
        print(
            f"{name:12} {statistics.fmean(means):6.2f} {by_token:9.2f} {statistics.median(means):7.2f} "
            f"{same:6}/{len(prompts)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
