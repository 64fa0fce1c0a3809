"""Tokens a round under the grammars of the tests, on the shipped pair: drafts filtered by the grammar, and not.

    python benchmarks/grammar_acceptance.py [--max-new-tokens 48] [--runs dflash,4,32] [--json FILE]

The first token, which prefill gives, and what the last round is cut by are not counted. Also checks that every output
is that of `none`. JSON grammars are compact, since this model goes on with white space for ever where it may. Grammars
whose text is over with the first token say nothing and are left out of the means.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ddtree_jax  # noqa: E402
from ddtree_jax.engine import Engine  # noqa: E402
from tests.grammar.grammars import CASES  # noqa: E402

GROUP = 15
PROMPT = "import json\n\nVALUE = json.loads('''"


def decode(engine: Engine, new: int, algorithm: str, budget: int, implementation: str) -> dict[str, ddtree_jax.Result]:
    names = sorted(CASES)
    found = {}
    for at in range(0, len(names), GROUP):
        group = names[at : at + GROUP]
        grammars = [CASES[name][0] for name in group]
        grammars = [dataclasses.replace(one, compact=one.kind == "json_schema") for one in grammars]
        results = ddtree_jax.generate(
            engine,
            [PROMPT] * len(group),
            new,
            algorithm,
            budget,
            grammar=grammars,
            grammar_implementation=implementation,
        )
        found |= dict(zip(group, results, strict=True))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--runs", default="dflash,4,32", help="dflash, or budgets of ddtree")
    parser.add_argument("--json", help="also write the numbers here")
    options = parser.parse_args()
    engine = ddtree_jax.load("demo")
    plain = decode(engine, options.max_new_tokens, "none", 0, "host")
    runs = options.runs.split(",")
    lengths: dict[str, dict[str, list[float]]] = {name: {} for name in plain}
    for run in runs:
        algorithm, budget = (run, 0) if run == "dflash" else ("ddtree", int(run))
        for implementation in ("unfiltered", "host"):
            found = decode(engine, options.max_new_tokens, algorithm, budget, implementation)
            for name, result in found.items():
                if result.token_ids != plain[name].token_ids:
                    raise SystemExit(f"{name}: {algorithm} {budget} {implementation} differs from none")
                stats = result.stats
                per_round = (stats.num_output_tokens - 1) / stats.num_rounds if stats.num_rounds else 0.0
                lengths[name].setdefault(run, []).append(per_round)
    print(f"{'grammar':28s} tokens  " + "  ".join(f"{run:>14s}" for run in runs) + "   (unfiltered -> filtered)")
    for name, found in lengths.items():
        cells = "  ".join(f"{found[run][0]:5.2f} -> {found[run][1]:5.2f}" for run in runs)
        print(f"{name:28s} {len(plain[name].token_ids):6d}  {cells}")
    means, worse = {}, {}
    for run in runs:
        counted = [found[run] for found in lengths.values() if found[run][0] > 0]
        means[run] = [statistics.fmean(values) for values in zip(*counted, strict=True)]
        worse[run] = [name for name, found in lengths.items() if found[run][1] < found[run][0]]
    print(f"{'mean':35s}  " + "  ".join(f"{means[run][0]:5.2f} -> {means[run][1]:5.2f}" for run in runs))
    print("filtered is worse: " + "; ".join(f"{run}: {', '.join(worse[run]) or 'never'}" for run in runs))
    if options.json:
        Path(options.json).write_text(json.dumps({"lengths": lengths, "means": means, "worse": worse}, indent=1))


if __name__ == "__main__":
    main()
