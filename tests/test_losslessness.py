"""Every algorithm gives the target's own tokens: exact equality on the shipped pair and its held-out prompts."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import ddtree_jax
from ddtree_jax.engine import Engine, demo_folder
from ddtree_jax.models import target_logits


@dataclasses.dataclass
class Decoder:
    """Runs prompts in groups of `batch`; equal shapes throughout, so one program serves all groups."""

    engine: Engine
    prompts: list[list[int]]
    max_new_tokens: int
    options: dict = dataclasses.field(default_factory=dict)

    def groups(self, batch: int) -> Iterator[list[int]]:
        assert len(self.prompts) % batch == 0, "a smaller last group would compile once more"
        return (list(range(at, at + batch)) for at in range(0, len(self.prompts), batch))

    def __call__(self, algorithm: str, budget: int = 0, *, batch: int) -> list[ddtree_jax.Result]:
        results = []
        for group in self.groups(batch):
            options = dict(self.options)
            if "seed" in options:
                options["seed"] = [options["seed"][i] for i in group]
            prompts = [self.prompts[i] for i in group]
            results += ddtree_jax.generate(self.engine, prompts, self.max_new_tokens, algorithm, budget, **options)
        return results

    def plain_logits(self, index: int, token_ids: list[int]) -> np.ndarray:
        """float32[T, V]: what the full forward says before each of `token_ids`, which follow the prompt."""
        prompt = self.prompts[index]
        return np.asarray(target_logits(self.engine.target, [prompt + token_ids[:-1]])[0, len(prompt) - 1 :])

    def assert_same(self, got: Sequence[ddtree_jax.Result], expected: Sequence[ddtree_jax.Result], label: str) -> None:
        """Exact equality of all token ids; says which prompt differs where, and how close the target's choice was."""
        faults = []
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            if one.token_ids != other.token_ids:
                faults.append(f"prompt {i}: {self._difference(i, one.token_ids, other.token_ids)}")
            elif one.finish_reason != other.finish_reason:
                faults.append(f"prompt {i}: finished by {one.finish_reason}, expected {other.finish_reason}")
        if faults:
            raise AssertionError("\n".join([f"{label}: {len(faults)} of {len(got)} prompts differ", *faults]))

    def _difference(self, index: int, got: list[int], expected: list[int]) -> str:
        pairs = zip(got, expected, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
        if at == min(len(got), len(expected)):
            return f"{len(got)} tokens, expected {len(expected)}, equal up to there"
        logits = self.plain_logits(index, expected)[at]
        first, second = np.sort(logits)[[-1, -2]]
        return (
            f"token {at} is {got[at]}, expected {expected[at]}; top-1/top-2 gap of the target there "
            f"{first - second:.3g} (logits {logits[got[at]]:.6g} and {logits[expected[at]]:.6g})"
        )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    entries = json.loads((demo_folder() / "heldout.json").read_text(encoding="utf-8"))
    return [entry["prompt_ids"] for entry in entries]


def mean_acceptance(results: Sequence[ddtree_jax.Result]) -> float:
    return float(np.mean([result.stats.mean_acceptance_length for result in results if result.stats.num_rounds]))


@pytest.fixture(scope="module")
def few(demo_engine: Engine, prompts: list[list[int]]) -> Decoder:
    assert str(demo_engine.target.dtype) == "float32"  # equality is promised for float32 alone
    return Decoder(demo_engine, prompts[:6], 32)


@pytest.fixture(scope="module")
def few_plain(few: Decoder) -> list[ddtree_jax.Result]:
    """What the target itself writes: one token a round, no drafter."""
    return few("none", batch=3)


def test_plain_decoding_is_the_argmax_of_the_full_forward(few: Decoder, few_plain) -> None:
    """The oracle of the other tests, without caches, absorbed attention and rounds."""
    token_ids = few_plain[1].token_ids
    assert few.plain_logits(1, token_ids).argmax(-1).tolist() == token_ids


@pytest.mark.parametrize(("algorithm", "budget"), [("dflash", 0), ("ddtree", 4), ("ddtree", 32)])
def test_greedy_output_is_that_of_plain_decoding(few: Decoder, few_plain, algorithm: str, budget: int) -> None:
    results = few(algorithm, budget, batch=3)
    few.assert_same(results, few_plain, f"{algorithm} budget {budget}, batch 3")
    # A tree of which nothing is ever accepted is lossless too.
    assert mean_acceptance(results) > 1.2


def test_greedy_output_is_the_same_alone_and_in_a_batch(few: Decoder, few_plain) -> None:
    alone = dataclasses.replace(few, prompts=few.prompts[:2])
    alone.assert_same(alone("ddtree", 15, batch=1), few_plain[:2], "ddtree budget 15, batch 1")


def test_sampled_output_is_that_of_plain_decoding(few: Decoder) -> None:
    """Noise belongs to the output position, so losslessness is equality here too, not only equality in law."""
    sampled = dataclasses.replace(
        few, prompts=few.prompts[:3], options=dict(temperature=0.7, top_p=0.95, seed=[11, 12, 13])
    )
    plain = sampled("none", batch=3)
    sampled.assert_same(sampled("ddtree", 32, batch=3), plain, "sampled ddtree budget 32")
    sampled.assert_same(sampled("dflash", batch=3), plain, "sampled dflash")
    reseeded = dataclasses.replace(sampled, options=sampled.options | {"seed": [21, 12, 23]})
    other = reseeded("none", batch=3)
    assert [one.token_ids == two.token_ids for one, two in zip(plain, other, strict=True)] == [False, True, False]


def test_a_difference_is_found_and_described(few: Decoder, few_plain) -> None:
    """Negative control of the comparison."""
    changed = list(few_plain)
    ids = list(changed[1].token_ids)
    ids[7] ^= 1
    changed[1] = dataclasses.replace(changed[1], token_ids=ids)
    with pytest.raises(AssertionError, match=r"1 of 6 prompts differ\nprompt 1: token 7 is .* gap"):
        few.assert_same(changed, few_plain, "changed")
    changed[1] = dataclasses.replace(changed[1], token_ids=few_plain[1].token_ids[:5])
    with pytest.raises(AssertionError, match="prompt 1: 5 tokens, expected"):
        few.assert_same(changed, few_plain, "cut")


BUDGETS = (0, 1, 4, 15, 32, 64)


@pytest.fixture(scope="module")
def many(demo_engine: Engine, prompts: list[list[int]]) -> Decoder:
    return Decoder(demo_engine, prompts[:51], 48)


@pytest.fixture(scope="module")
def many_plain(many: Decoder) -> list[ddtree_jax.Result]:
    return many("none", batch=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("algorithm", "budget"), [("dflash", 0), *(("ddtree", budget) for budget in BUDGETS)])
def test_51_prompts_at_every_budget(many: Decoder, many_plain, algorithm: str, budget: int, batch: int) -> None:
    results = many(algorithm, budget, batch=batch)
    many.assert_same(results, many_plain, f"{algorithm} budget {budget}, batch {batch}")
    accepted = mean_acceptance(results)
    # With the root alone a round gives one token.
    assert accepted == 1.0 if (algorithm, budget) == ("ddtree", 0) else accepted > 1.2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_51_prompts_of_plain_decoding_in_batches(many: Decoder, many_plain) -> None:
    many.assert_same(many("none", batch=3), many_plain, "none, batch 3")
    assert len(many_plain) == 51 and sum(len(result.token_ids) for result in many_plain) > 51 * 24
