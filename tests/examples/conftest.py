"""Puts `examples/` on the path, and gives the tests a small pair."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

from demo_training import modules  # noqa: E402
from demo_training.sizes import DemoSizes  # noqa: E402

from ddtree_jax import models  # noqa: E402
from ddtree_jax.models import DFlashConfig, Glm5Config  # noqa: E402


@pytest.fixture(scope="session")
def sizes() -> DemoSizes:
    """Sizes of the small pair."""
    return DemoSizes.tiny()


@pytest.fixture(scope="session")
def pair(sizes: DemoSizes) -> tuple[models.Target, models.Drafter]:
    """A random float32 pair whose layers are unrolled, as in training."""
    config = Glm5Config.from_hf(sizes.target_hf_config(0))
    target = models.Target(config, *modules.new_target(config, 3))
    draft_config = DFlashConfig.from_hf(sizes.drafter_hf_config(0, 1))
    drafter = models.Drafter(draft_config, *modules.new_drafter(draft_config, 4, config.hidden_size))
    return target, drafter
