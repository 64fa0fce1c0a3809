"""Every algorithm gives the target's own tokens: exact equality on the shipped pair and its held-out prompts."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import ddtree_jax
from ddtree_jax.engine import Engine, demo_folder
from ddtree_jax.models import ConvConfig, DFlashConfig, SelectorConfig, make_drafter, target_logits
from ddtree_jax.models.pair import flat_leaves
from tests.engine.conftest import dflash2_noise


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


@pytest.mark.parametrize(
    ("algorithm", "budget"),
    [
        pytest.param("dflash", 0, marks=pytest.mark.slow),
        pytest.param("ddtree", 4, marks=pytest.mark.slow),
        ("ddtree", 32),
    ],
)
def test_greedy_output_is_that_of_plain_decoding(few: Decoder, few_plain, algorithm: str, budget: int) -> None:
    results = few(algorithm, budget, batch=3)
    few.assert_same(results, few_plain, f"{algorithm} budget {budget}, batch 3")
    # A tree of which nothing is ever accepted is lossless too.
    assert mean_acceptance(results) > 1.2


@pytest.mark.slow
def test_greedy_output_is_the_same_alone_and_in_a_batch(few: Decoder, few_plain) -> None:
    alone = dataclasses.replace(few, prompts=few.prompts[:2])
    alone.assert_same(alone("ddtree", 15, batch=1), few_plain[:2], "ddtree budget 15, batch 1")


@pytest.mark.slow
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


def grafted_dflash2(demo_engine: Engine) -> Engine:
    """The shipped drafter as a DFlash2 one, its convolutions near the identity and its codebooks random: it drafts
    well enough that long paths are accepted, and differently from the shipped one.
    """
    first = demo_engine.drafter
    parts = dict(conv=ConvConfig(kernel_size=2, group_size=16), selector=SelectorConfig(rank=32, top_k=16))
    drafter = make_drafter(dataclasses.replace(first.config, **parts), demo_engine.target)
    for path, leaf in flat_leaves(first.params).items():
        variable = drafter.params
        for key in path:
            variable = variable[key]
        variable[...] = leaf
    return Engine(demo_engine.target, dflash2_noise(drafter, conv=0.02, pairs=0.2), None, "grafted")


def random_dflash2(demo_engine: Engine) -> Engine:
    """A small random DFlash2 drafter with a sliding window: nearly all of what it drafts is rejected."""
    shipped = demo_engine.drafter.config
    config = DFlashConfig(
        **{name: getattr(shipped, name) for name in ("vocab_size", "hidden_size", "mask_token_id", "rope_theta")},
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        block_size=8,
        target_layer_ids=(1, 4),
        rms_norm_eps=1e-5,
        max_position_embeddings=1024,
        causal=(False, False),
        windows=(16, 16),
        conv=ConvConfig(kernel_size=2, group_size=16),
        selector=SelectorConfig(rank=16, top_k=16),
    )
    drafter = dflash2_noise(make_drafter(config, demo_engine.target, seed=4), conv=0.5, pairs=1.0)
    return Engine(demo_engine.target, drafter, None, "random")


@pytest.fixture(scope="module")
def dflash2_engines(demo_engine: Engine) -> dict[str, Engine]:
    return {"grafted": grafted_dflash2(demo_engine), "random": random_dflash2(demo_engine)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "algorithm", "budget"), [("grafted", "ddtree", 15), ("grafted", "dflash", 0)])
def test_greedy_output_with_dflash2(few: Decoder, few_plain, dflash2_engines, kind: str, algorithm: str, budget: int):
    second = dataclasses.replace(few, engine=dflash2_engines[kind], prompts=few.prompts[:3])
    results = second(algorithm, budget, batch=3)
    second.assert_same(results, few_plain[:3], f"{kind} DFlash2, {algorithm} budget {budget}, batch 3")
    assert mean_acceptance(results) > 1.2


@pytest.mark.slow
def test_sampled_output_with_dflash2(few: Decoder, dflash2_engines) -> None:
    options = dict(temperature=0.7, top_p=0.95, seed=[11, 12, 13])
    first = dataclasses.replace(few, prompts=few.prompts[:3], options=options)
    second = dataclasses.replace(first, engine=dflash2_engines["grafted"])
    second.assert_same(second("ddtree", 15, batch=3), first("none", batch=3), "sampled DFlash2, ddtree budget 15")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["grafted", "random"])
@pytest.mark.parametrize(("algorithm", "budget"), [("dflash", 0), *(("ddtree", budget) for budget in BUDGETS)])
def test_dflash2_at_every_budget(
    many: Decoder, many_plain, dflash2_engines, kind: str, algorithm: str, budget: int, batch: int
) -> None:
    second = dataclasses.replace(many, engine=dflash2_engines[kind], prompts=many.prompts[:12])
    results = second(algorithm, budget, batch=batch)
    second.assert_same(results, many_plain[:12], f"{kind} DFlash2, {algorithm} budget {budget}, batch {batch}")
    if kind == "grafted" and (algorithm, budget) != ("ddtree", 0):
        assert mean_acceptance(results) > 1.2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["grafted", "random"])
def test_dflash2_sampled_with_every_algorithm(many: Decoder, dflash2_engines, kind: str) -> None:
    options = dict(temperature=0.9, top_k=50, seed=list(range(12)))
    first = dataclasses.replace(many, prompts=many.prompts[:12], options=options)
    second = dataclasses.replace(first, engine=dflash2_engines[kind])
    plain = first("none", batch=3)
    for algorithm, budget in (("dflash", 0), ("ddtree", 4), ("ddtree", 32)):
        second.assert_same(second(algorithm, budget, batch=3), plain, f"sampled {kind} DFlash2, {algorithm} {budget}")
