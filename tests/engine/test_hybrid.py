"""Targets with recurrent layers, end to end: the gate, chains in slot order, and trees whose states follow the nodes.

What a forced tree does to the states of single nodes is in test_hybrid_state.py.
"""

import dataclasses
import itertools

import chex
import jax
import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import bench, cli, decoding
from ddtree_jax.engine import Engine, open_pair
from ddtree_jax.errors import HybridStateWarning, UnsupportedRequestError
from ddtree_jax.models import DFlashConfig, Glm5Config, make_drafter, target_logits
from ddtree_jax.models.folders import Opened
from ddtree_jax.requests import check_request
from tests.engine.hybrid_target import HybridConfig, SlotOrderNet, TreeStateNet, make_hybrid, make_told_drafter

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = HybridConfig()
DRAFTER = DFlashConfig(
    vocab_size=CONFIG.vocab_size,
    hidden_size=CONFIG.hidden_size,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    block_size=6,
    mask_token_id=CONFIG.vocab_size - 1,
    target_layer_ids=(0, 2),
    rope_theta=1e3,
    rms_norm_eps=1e-6,
    max_position_embeddings=192,
    causal=(False,),
    windows=(None,),
    num_target_layers=3,
)
# In chunks of 32, the last one ends inside its third chunk while the others have long ended.
PROMPTS = [
    [7, 3, 11, 2, 4, 14, 8, 1, 17],
    [5, 3, 3, 21, 8, 9, 20],
    np.random.default_rng(0).integers(0, 22, 71).tolist(),
]
NEW = 32
FLAG = "--speculative-ddtree-allow-hybrid-unsafe"


@pytest.fixture(autouse=True, scope="module")
def short_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "CHUNK_TOKENS", 32)
        yield


@pytest.fixture(scope="module")
def targets(quick_compilation):
    """Both nets over the same parameters."""
    return {module: make_hybrid(module, CONFIG, seed=1) for module in (SlotOrderNet, TreeStateNet)}


def run(engine, prompts, algorithm, budget=0, **options):
    return ddtree_jax.generate(engine, prompts, NEW, algorithm, budget, stop_token_ids=[], **options)


def tokens(results):
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def plain(targets, short_chunks):
    """Greedy continuations by plain decoding in slot order."""
    return tokens(run(Engine(targets[SlotOrderNet]), PROMPTS, "none"))


def told(target, continuations, prompts=PROMPTS):
    """An engine whose drafter is mostly right."""
    sequences = [prompt + new for prompt, new in zip(prompts, continuations, strict=True)]
    return Engine(target, make_told_drafter(DRAFTER, target, sequences, seed=2), None, "told")


# ---- the gate: nothing here runs on a device


@pytest.fixture(scope="module")
def gated(targets):
    """(module, allow_hybrid_unsafe) -> a fresh engine."""
    drafter = make_drafter(DRAFTER, targets[SlotOrderNet], seed=2)

    def engine(module, allow=False):
        return Engine(targets[module], drafter, None, "hybrid", allow)

    return engine


def admit(engine, algorithm, budget):
    return check_request(engine, PROMPTS[0], NEW, algorithm, budget, 0.0, None, None, None, 0, None, None)


@pytest.mark.parametrize("call", [ddtree_jax.generate, ddtree_jax.stream])
@pytest.mark.parametrize("budget", [2, 15])
def test_regression_f71_a_branching_tree_on_recurrent_layers_is_refused_naming_the_flag(gated, call, budget):
    with pytest.raises(UnsupportedRequestError) as caught:
        call(gated(SlotOrderNet), PROMPTS[0], NEW, "ddtree", budget)
    for named in ("DDTREE", f"budget {budget}", "layers 0, 2 of hybrid", "allow_hybrid_unsafe=True", FLAG):
        assert named in str(caught.value)


def test_regression_f71_with_the_flag_it_is_allowed_and_warns_once_an_engine(gated):
    for engine in (gated(SlotOrderNet, True), gated(SlotOrderNet, True)):
        with pytest.warns(HybridStateWarning, match="layers 0, 2") as caught:
            for budget in (2, 15, 2):
                assert admit(engine, "ddtree", budget).budget == budget
        assert len(caught) == 1


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize(("algorithm", "budget"), [("none", 0), ("dflash", 32), ("ddtree", 0), ("ddtree", 1)])
def test_regression_f71_chains_are_allowed_and_warn_of_nothing(gated, algorithm, budget, allow):
    assert admit(gated(SlotOrderNet, allow), algorithm, budget).budget == budget


def test_regression_f71_a_target_with_states_by_node_needs_no_flag(gated):
    for budget in (0, 1, 2, 15):
        assert admit(gated(TreeStateNet), "ddtree", budget).budget == budget


def test_a_flag_that_nothing_would_read_is_an_error(gated):
    with pytest.raises(
        ValueError, match="allow_hybrid_unsafe: got True, but hybrid has no recurrent.*allowed is False"
    ):
        gated(TreeStateNet, True)
    for value in (1, "yes", None):
        with pytest.raises(ValueError, match="allow_hybrid_unsafe: got .*allowed are True and False"):
            gated(SlotOrderNet, value)


@pytest.fixture
def no_weights(monkeypatch):
    """Reading weights gives what was opened, and is counted."""
    reads = []
    monkeypatch.setattr(Opened, "read", lambda self, progress=None: reads.append(self) or self)
    return reads


@pytest.fixture
def recurrent_demo(monkeypatch, no_weights):
    """The shipped target with layers that call themselves recurrent."""
    monkeypatch.setattr(Glm5Config, "recurrent_layers", property(lambda self: (1, 3)))
    return no_weights


def test_the_flag_is_an_error_at_load_where_the_target_only_attends(no_weights, capsys):
    with pytest.raises(ValueError, match="allow_hybrid_unsafe: got True, but demo has no recurrent layers"):
        ddtree_jax.load("demo", allow_hybrid_unsafe=True)
    assert cli.main(["generate", "x", FLAG]) == 2
    assert cli.main(["bench", FLAG]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("allow_hybrid_unsafe: got True" in line for line in errors)
    assert not no_weights and open_pair("demo").target.tree_states is False


def test_a_request_is_refused_before_the_weights_load(recurrent_demo, capsys):
    with pytest.raises(UnsupportedRequestError, match="layers 1, 3 of demo"):
        ddtree_jax.load("demo", check=lambda engine: admit(engine, "ddtree", 2))
    assert cli.main(["generate", "x"]) == 2
    assert cli.main(["bench", "--prompts", "1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(FLAG in line for line in errors)
    assert not recurrent_demo


def test_the_engine_does_not_repeat_what_was_warned_of_before_its_weights(recurrent_demo):
    with pytest.warns(HybridStateWarning) as caught:
        engine = ddtree_jax.load("demo", allow_hybrid_unsafe=True, check=lambda engine: admit(engine, "ddtree", 2))
        admit(engine, "ddtree", 2)
    assert len(caught) == 1 and len(recurrent_demo) == 2
    assert engine.allow_hybrid_unsafe


def test_the_benchmark_is_gated_for_every_tree_that_it_would_run(gated):
    engine = gated(SlotOrderNet)
    assert bench.check(engine, bench.BenchSettings(budgets=(0, 1)))
    with pytest.raises(UnsupportedRequestError, match="budget 4"):
        bench.check(engine, bench.BenchSettings(budgets=(1, 4)))


# ---- chains in slot order


def test_a_chain_in_slot_order_equals_plain_decoding(targets, plain):
    """Every commit takes the state after its last accepted node, however long the path is."""
    results = run(told(targets[SlotOrderNet], plain), PROMPTS, "dflash")
    assert tokens(results) == plain
    assert {length for result in results for length in result.stats.acceptance_lengths} >= {1, 2, 3, 4}


def test_regression_f68_a_prompt_of_several_chunks_and_decoding_equal_one_pass(targets, plain):
    longest = max(len(prompt) for prompt in PROMPTS) + NEW
    sequences = [prompt + new for prompt, new in zip(PROMPTS, plain, strict=True)]
    padded = np.array([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    chosen = np.asarray(target_logits(targets[SlotOrderNet], padded)).argmax(-1)
    for row, prompt, new in zip(chosen, PROMPTS, plain, strict=True):
        assert row[len(prompt) - 1 :][:NEW].tolist() == new


# ---- trees with states by node


def test_trees_with_states_by_node_equal_plain_decoding(targets, plain, monkeypatch):
    """In one compiled program, accepting branches: paths of three nodes and more that skip slots."""
    limited = jax.jit(chex.assert_max_traces(decoding.run_round, n=1), static_argnums=0, donate_argnums=2)
    monkeypatch.setattr(decoding, "round_step", limited)
    engine = told(targets[TreeStateNet], plain)
    chunks = list(ddtree_jax.stream(engine, PROMPTS, NEW, "ddtree", 15, stop_token_ids=[], with_tree=True))
    found = [sum((chunk.token_ids for chunk in chunks if chunk.index == i), []) for i in range(3)]
    assert found == plain
    trees = [(chunk.tree, chunk.tree.batch_index) for chunk in chunks if chunk.tree is not None]
    accepted = [tree.path.node_ids[row, : tree.path.length[row]].tolist() for tree, row in trees]
    apart = [path for path in accepted if path != list(range(len(path)))]
    assert len(apart) >= 5 and any(len(path) >= 3 for path in apart)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 4, 15])
def test_trees_of_every_size_alone_and_in_a_batch(targets, plain, budget):
    """With the drafter that has been told, and with a random one."""
    target = targets[TreeStateNet]
    results = run(told(target, plain), PROMPTS, "ddtree", budget)
    assert tokens(results) == plain
    assert max(result.stats.mean_acceptance_length for result in results) > 1.5
    for i in (0, 2):
        alone = told(target, plain[i : i + 1], PROMPTS[i : i + 1])
        assert run(alone, PROMPTS[i], "ddtree", budget).token_ids == plain[i]
    assert tokens(run(Engine(target, make_drafter(DRAFTER, target, seed=4)), PROMPTS, "ddtree", budget)) == plain


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"top_k": 12, "top_p": 0.9, "min_p": 0.01}], ids=["plain", "filtered"])
def test_sampled_output_is_that_of_plain_decoding(targets, options):
    options |= {"temperature": 1.2, "seed": [3, 4, 5]}
    plain = tokens(run(Engine(targets[SlotOrderNet]), PROMPTS, "none", **options))
    results = run(told(targets[TreeStateNet], plain), PROMPTS, "ddtree", 15, **options)
    assert tokens(results) == plain
    assert max(result.stats.mean_acceptance_length for result in results) > 1.5
    assert tokens(run(told(targets[SlotOrderNet], plain), PROMPTS, "dflash", **options)) == plain
    options["seed"] = 4
    alone = told(targets[TreeStateNet], plain[1:2], PROMPTS[1:2])
    assert run(alone, PROMPTS[1], "ddtree", 15, **options).token_ids == plain[1]


@pytest.mark.slow
def test_what_the_flag_allows_is_not_plain_decoding(targets, plain):
    """The reason for the gate: in slot order the same tree writes another text, and one without branches does not."""
    engine = dataclasses.replace(told(targets[SlotOrderNet], plain), allow_hybrid_unsafe=True)
    assert tokens(run(engine, PROMPTS, "ddtree", 1)) == plain
    with pytest.warns(HybridStateWarning) as caught:
        spoiled = tokens(run(engine, PROMPTS, "ddtree", 15))
        assert tokens(run(engine, PROMPTS, "ddtree", 15)) == spoiled
    assert len(caught) == 1
    assert sum(a != b for a, b in zip(itertools.chain(*spoiled), itertools.chain(*plain), strict=True)) > NEW // 2


@pytest.mark.slow
def test_debug_mode_and_the_benchmarks_stages_know_states(targets, plain):
    from ddtree_jax.profiling import round_breakdown

    engine = told(targets[TreeStateNet], plain)
    assert tokens(run(engine, PROMPTS, "ddtree", 4, debug=True)) == plain
    assert round_breakdown(engine, "ddtree", 4, 3, prompt_tokens=9, max_new_tokens=8, repeats=1)["commit"] > 0
