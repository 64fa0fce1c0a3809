"""The rest of an independent DFlash2 drafter: its candidate selector in numpy float64, one pair at a time; weights.

The convolutions are in `dflash_reference.convolved`, inside the block that they change.
"""

import dflash_reference
import numpy as np

DFLASH2 = dict(conv_kernel_size=2, conv_group_size=4, selector_rank=6, selector_top_k=5)


def drafter_config(**changes) -> dict:
    """A config.json of a small DFlash2 drafter for the golden targets; changes as for DFlash v1."""
    inner = DFLASH2 | changes.pop("dflash_config", {})
    return dflash_reference.drafter_config(**dict(architectures=["DFlash2DraftModel"], dflash_config=inner) | changes)


def random_weights(config, seed: int) -> dict[str, np.ndarray]:
    """Float32 tensors under their published names; convolutions far from the identity, pair scores like logits."""
    weights = dflash_reference.random_weights(config, seed)
    generator = np.random.default_rng(seed + 1000)
    inner, size, vocab = config["dflash_config"], config["hidden_size"], config["vocab_size"]
    taps, groups = inner["conv_kernel_size"], size // inner["conv_group_size"]
    rank = inner["selector_rank"]

    def normal(*shape, scale):
        return (generator.standard_normal(shape) * scale).astype(np.float32)

    for layer in range(config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{layer}.{name}"
            base = normal(2, taps, size, scale=0.4)
            base[:, 0] += 1
            weights[f"{prefix}.base_kernel"] = base
            weights[f"{prefix}.kernel_projection.weight"] = normal(2 * taps * groups, size, scale=0.4 * size**-0.5)
    weights["candidate_selector.predecessor_codebook"] = normal(vocab, rank, scale=1.0)
    weights["candidate_selector.successor_codebook"] = normal(vocab, rank, scale=2 * rank**-0.5)
    weights["candidate_selector.hidden_projection.weight"] = normal(rank, size, scale=size**-0.5)
    return weights


def pair_score(weights, hidden_row, predecessor: int, successor: int) -> float:
    query = weights["candidate_selector.predecessor_codebook"][predecessor] * (
        weights["candidate_selector.hidden_projection.weight"] @ hidden_row
    )
    return float(query @ weights["candidate_selector.successor_codebook"][successor])


def candidate_scores(config, weights, logits_row, hidden_row, predecessor: int) -> dict[int, float]:
    """{token id: logit + pair score} of one row's top-k tokens below one token."""
    ids = sorted(range(len(logits_row)), key=lambda i: (-logits_row[i], i))[: config["dflash_config"]["selector_top_k"]]
    return {i: logits_row[i] + pair_score(weights, hidden_row, predecessor, i) for i in ids}


def log_probs(scores: dict[int, float]) -> dict[int, float]:
    total = np.log(np.sum(np.exp(list(scores.values()))))
    return {i: score - total for i, score in scores.items()}


def greedy_path(config, weights, logits, hidden, root_token_id: int) -> list[int]:
    """The selector's own chain: each row's best candidate, which is the next row's predecessor."""
    tokens = [root_token_id]
    for logits_row, hidden_row in zip(logits, hidden, strict=True):
        scores = candidate_scores(config, weights, logits_row, hidden_row, tokens[-1])
        tokens.append(max(scores, key=scores.get))
    return tokens[1:]
