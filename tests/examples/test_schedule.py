"""Clock, learning rate, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demo_training import export, schedule


def test_clock_starts_when_told() -> None:
    time = [100.0]
    clock = schedule.Clock(10.0, now=lambda: time[0])
    time[0] = 150.0
    assert clock.elapsed == 0.0 and not clock.done
    clock.start()
    time[0] = 155.0
    clock.start()
    assert clock.fraction == 0.5 and not clock.done
    time[0] = 170.0
    assert clock.fraction == 1.0 and clock.done


def test_learning_rate_warms_up_stays_and_falls() -> None:
    def rate(fraction: float, step: int = 1000) -> float:
        return schedule.learning_rate(fraction, step, peak=2.0, warmup_steps=100, flat=0.4)

    assert rate(0.0, step=0) == pytest.approx(0.02)
    assert rate(0.0, step=49) == pytest.approx(1.0)
    assert rate(0.0) == rate(0.4) == pytest.approx(2.0)
    assert rate(0.7) == pytest.approx(2.0 * (1 - 0.98 * 0.5))
    assert rate(1.0) == pytest.approx(0.04)


def test_trees_survive_a_file(tmp_path) -> None:
    tree = {
        "a": {"kernel": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)},
        "b": [jnp.ones(4), jnp.zeros(2)],
    }
    schedule.save_tree(tmp_path / "x.npz", tree)
    read = schedule.load_tree(tmp_path / "x.npz", tree)
    assert jax.tree.map(lambda x: x.dtype, read) == jax.tree.map(lambda x: x.dtype, tree)
    jax.tree.map(np.testing.assert_array_equal, read, tree)
    with pytest.raises(ValueError, match="b/0"):
        schedule.load_tree(tmp_path / "x.npz", {**tree, "b": [jnp.ones(5), jnp.zeros(2)]})


def test_weight_decay_reaches_only_named_leaves() -> None:
    params = {"kernel": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    chain = schedule.adamw(lambda name, leaf: name == "kernel", weight_decay=0.5)
    zero = jax.tree.map(jnp.zeros_like, params)
    moved, _ = schedule.apply(chain, params, chain.init(params), zero, jnp.float32(0.1))
    np.testing.assert_allclose(moved["kernel"], 0.95)
    np.testing.assert_array_equal(moved["norm"], 1.0)


def test_archives_are_cut_and_joined(tmp_path) -> None:
    work, out, back = (tmp_path / name for name in ("work", "out", "back"))
    (work / "demo").mkdir(parents=True)
    (work / "demo" / "weights").write_bytes(bytes(range(256)) * 100)
    (work / "log").write_text("hello")
    parts = export.pack([work / "demo", work / "log", work / "absent"], work, out, part_bytes=10_000)
    assert len(parts) > 2 and all(part.stat().st_size <= 10_000 for part in parts)
    export.unpack(out, back)
    assert (back / "demo" / "weights").read_bytes() == bytes(range(256)) * 100
    assert sorted(path.name for path in back.iterdir()) == ["demo", "log"]
    assert len(export.pack([work / "log"], work, out)) == 1 == len(list(out.glob("work.tar.*")))
    with pytest.raises(FileNotFoundError):
        export.unpack(tmp_path / "nothing", back)
