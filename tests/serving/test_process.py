"""The server as a process of its own, where only that shows it."""

import signal
import subprocess
import sys

import pytest

from tests.serving.processes import ROOT, WAIT_S

# Compilers that are at work until the process ends, in the place of what reads the weights.
COMPILES = """
import itertools
import jax
from ddtree_jax import cli
from ddtree_jax.engine import OpenedPair

jax.config.update("jax_platforms", "cpu")

def read(self, progress):
    for i in itertools.count():
        jax.jit(lambda x: jax.numpy.sort(jax.numpy.sin(x + i) @ x))(jax.numpy.ones((8, 8)))
        if i == 3:
            progress("compilers are at work")

OpenedPair.read = read
raise SystemExit(cli.main(["serve", "--port", "0", "--grace-period", "0"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(2 * WAIT_S)
def test_a_server_that_is_told_to_stop_while_it_compiles_ends_with_0():
    """A compiler cannot be interrupted, and crashes a process that leaves it behind."""
    command = [sys.executable, "-c", COMPILES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            lines = iter(process.stderr.readline, "")
            assert any("compilers are at work" in line for line in lines)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert '"message": "stopped"' in err.splitlines()[-1]
