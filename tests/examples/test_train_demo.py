"""The whole recipe, shrunk: seconds a stage, a few files, a pair of a few thousand weights."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import train_demo
from demo_training import export
from demo_training.sizes import DemoSizes

import ddtree_jax
from ddtree_jax.safetensors_files import read_header

FILES = "argparse ast bisect csv dataclasses enum functools heapq inspect pathlib random shutil".split()
SCRIPT = Path(train_demo.__file__)


def run_script(*arguments: object) -> None:
    subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], check=True, env={"JAX_PLATFORMS": "cpu"})


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder after all stages, run as two commands."""
    folder = tmp_path_factory.mktemp("train_demo")
    corpus = folder / "corpus"
    corpus.mkdir()
    for name in FILES:
        text = (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text()
        (corpus / f"{name}.py").write_text(text)
    common = [
        "--work",
        folder / "work",
        "--out",
        folder / "out",
        "--tiny",
        "--workers",
        0,
        "--corpus",
        corpus,
    ]
    run_script(*common, "--stages", "data,target,indexer", "--seconds", "target=2,indexer=1")
    run_script(
        *("--work", folder / "second", "--unpack", folder / "out", "--out", folder / "out2", "--tiny"),
        *("--workers", 0, "--corpus", corpus, "--seconds", "own_text=0.5,drafter=2"),
        *("--stages", "data,own_text,drafter,evaluate,export"),
    )
    return folder


@pytest.fixture(scope="module")
def engine(work: Path) -> "ddtree_jax.Engine":
    demo = work / "second" / "demo"
    return ddtree_jax.load(demo / "target", demo / "drafter")


@pytest.mark.slow
def test_second_command_goes_on_from_the_archive(work: Path) -> None:
    first, second = work / "work", work / "second"
    for name in ("tokenizer.json", "heldout.json", "target/model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    np.testing.assert_array_equal(np.load(first / "train.npy"), np.load(second / "train.npy"))
    records = [json.loads(line) for line in (work / "out2" / "log.jsonl").read_text().splitlines()]
    done = [record["stage"] for record in records if record.get("summary")]
    assert done == ["data", "target", "indexer", "data", "own_text", "drafter", "evaluate", "export"]
    assert not [record for record in records if "error" in record]


@pytest.mark.slow
def test_training_lowers_the_losses(work: Path) -> None:
    records = [json.loads(line) for line in (work / "out2" / "log.jsonl").read_text().splitlines()]
    target = next(r for r in records if r["stage"] == "target" and r.get("summary"))
    assert target["heldout_loss"] < np.log(512) - 0.5
    kl = [r["kl"] for r in records if r["stage"] == "indexer" and "kl" in r]
    assert all(last < first for first, last in zip(kl[0], kl[-1], strict=True))
    acceptance = json.loads((work / "second" / "evaluation.json").read_text())["acceptance"]
    assert acceptance["dflash"]["mean"] > 1.2


@pytest.mark.slow
def test_folder_is_what_ships(work: Path) -> None:
    demo = work / "second" / "demo"
    files = {path.relative_to(demo).as_posix() for path in demo.rglob("*") if path.is_file()}
    quantised = {f"target-nvfp4/{name.split('/')[1]}" for name in files if name.startswith("target/")}
    assert {name for name in files if name.startswith("target-nvfp4/")} == quantised | {
        "target-nvfp4/hf_quant_config.json"
    }
    assert {name for name in files if not name.startswith("target-nvfp4/")} == {
        "README.md",
        "heldout.json",
        "target/chat_template.jinja",
        "target/config.json",
        "target/generation_config.json",
        "target/model.safetensors",
        "target/tokenizer.json",
        "target/tokenizer_config.json",
        "drafter/config.json",
        "drafter/model.safetensors",
    }
    dtypes = {name: entry.dtype for name, entry in read_header(demo / "target" / "model.safetensors").items()}
    router = {name for name in dtypes if name.endswith(("mlp.gate.weight", "e_score_correction_bias"))}
    assert router and all(dtypes[name] == ("F32" if name in router else "BF16") for name in dtypes)
    prompts = json.loads((demo / "heldout.json").read_text())
    assert prompts
    for prompt in prompts:
        assert list(prompt) == ["id", "source", "license", "prompt", "prompt_ids", "reference"]
    card = (demo / "README.md").read_text()
    assert "| corpus | NOASSERTION |" in card and "| dflash |" in card and "{" not in card
    export.unpack(work / "out2", work / "joined")
    assert (work / "joined" / "demo" / "README.md").read_text() == card


@pytest.mark.slow
def test_simulated_rounds_are_those_of_real_decoding(work: Path, engine: "ddtree_jax.Engine") -> None:
    evaluation = json.loads((work / "second" / "evaluation.json").read_text())
    prompts = json.loads((work / "second" / "heldout.json").read_text())
    texts = np.load(work / "second" / "heldout_text.npy")
    ids = [prompt["prompt_ids"] for prompt in prompts]
    for name, arguments in {
        "dflash": {"algorithm": "dflash"},
        "ddtree4": {"algorithm": "ddtree", "budget": 4},
    }.items():
        results = ddtree_jax.generate(engine, ids, max_new_tokens=16, **arguments)
        for result, text, rounds in zip(results, texts, evaluation["rounds"][name], strict=True):
            new = len(result.token_ids)
            assert result.token_ids == text[len(ids[0]) :][:new].tolist()
            assert list(result.stats.acceptance_lengths) == rounds


@pytest.mark.slow
def test_text_prompts_use_the_tokenizer_of_the_folder(engine: "ddtree_jax.Engine") -> None:
    result = ddtree_jax.generate(engine, "def main():\n    ", max_new_tokens=8)
    assert len(result.token_ids) <= 8 and isinstance(result.text, str)


DFLASH2_SIZES = ("conv_kernel_size=2", "conv_group_size=8", "selector_rank=8", "selector_top_k=8")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("overrides", [(), DFLASH2_SIZES], ids=["dflash", "dflash2"])
def test_drafter_for_a_target_of_the_users_own(work: Path, overrides: tuple[str, ...]) -> None:
    own = work / f"own{len(overrides)}"
    run_script(
        *("--work", own, "--tiny", "--workers", 0, "--corpus", work / "corpus"),
        *("--target", work / "second" / "demo" / "target", "--seconds", "own_text=1,drafter=3"),
        *("--stages", "data,own_text,drafter,evaluate,export"),
        *(word for override in overrides for word in ("--size", override)),
    )
    engine = ddtree_jax.load(own / "demo" / "target", own / "demo" / "drafter")
    assert (engine.drafter.config.selector is not None) == bool(overrides)
    name = "DFlash2DraftModel" if overrides else "DFlashDraftModel"
    assert f"`drafter/`: {name} with" in (own / "demo" / "README.md").read_text()
    result = ddtree_jax.generate(engine, [5, 6, 7], max_new_tokens=8, algorithm="ddtree", budget=4)
    plain = ddtree_jax.generate(engine, [5, 6, 7], max_new_tokens=8, algorithm="none")
    assert result.token_ids == plain.token_ids


def test_durations_are_cut_to_a_deadline() -> None:
    seconds = train_demo.parse_seconds("target=200,indexer=100")
    assert train_demo.fit(seconds, ["target", "indexer"], 10_000) == seconds
    cut = train_demo.fit(seconds, ["target", "indexer"], 60 + 150)
    assert (cut["target"], cut["indexer"], cut["drafter"]) == (100, 50, seconds["drafter"])
    assert train_demo.fit(seconds, ["target"], 0)["target"] == 10
    with pytest.raises(ValueError, match="nonsense"):
        train_demo.parse_seconds("nonsense=3")


def test_unknown_stage_or_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        train_demo.main(["--work", str(tmp_path), "--stages", "nonsense"])
    with pytest.raises(ValueError, match="num_lairs"):
        DemoSizes.from_overrides(DemoSizes.tiny(), {"num_lairs": "3"})
