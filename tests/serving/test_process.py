"""The server as a process of its own, where only that shows it."""

import signal
import subprocess
import sys

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from tests.serving.processes import ROOT, WAIT_S, server_process

# Compilers that are at work until the process ends, in the place of what reads the weights.
COMPILES = """
import itertools
import jax
from ddtree_jax import cli
from ddtree_jax.engine import OpenedPair

jax.config.update("jax_platforms", "cpu")

def read(self, progress, *, capacity):
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("grace", [60, 0])
def test_streams_finish_or_end_as_unavailable_when_the_server_is_told_to_stop(grace):
    params = pb.SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    options = ("--max-running-requests", "2", "--context-length", "512", "--grace-period", str(grace))
    with server_process(*options) as server:
        calls = [
            server.stub.Generate(pb.GenerateRequest(text=text, sampling_params=params, stream=True), timeout=2 * WAIT_S)
            for text in ("import os\n", "def f(", "class A:\n")  # the third waits for a slot
        ]
        firsts = [next(call) for call in calls[:2]]
        assert all(first.chunk.token_ids for first in firsts)
        server.process.send_signal(signal.SIGTERM)
        if grace:
            ends = [list(call)[-1].complete for call in calls]
            assert [(end.completion_tokens, end.finish_reason) for end in ends] == [(300, "length")] * 3
        else:
            for call in calls:
                with pytest.raises(grpc.RpcError) as caught:
                    list(call)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(WAIT_S) == 0
