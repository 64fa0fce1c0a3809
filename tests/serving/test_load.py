"""Load on loopback: a server process, a client process, and every answer compared with `generate`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree_jax
from ddtree_jax.bench import held_out_prompts
from tests.serving.load_specs import make_specs
from tests.serving.processes import START_S, server_process

REQUESTS, NUM_SPECS, CONCURRENCY, SEED = 2000, 60, 32, 3
LOAD_S = 3000
MEMORY_BYTES = 96 * 2**20  # that the server's process may have grown by between the first part of the load and its end


def resident_bytes(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])


def offline(engine, spec):
    """(tokens, finish reason) of plain decoding, cut behind the token with which the text has the stop string."""
    result = ddtree_jax.generate(engine, spec.prompt, algorithm="none", **spec.generate_options())
    for count in range(1, len(result.token_ids) + 1):
        if spec.stop is not None and spec.stop in engine.tokenizer.decode(result.token_ids[:count]):
            return result.token_ids[:count], "stop"
    return result.token_ids, result.finish_reason


@pytest.mark.slow
@pytest.mark.timeout(START_S + LOAD_S)
def test_two_thousand_requests(demo_engine, tmp_path):
    prompts = held_out_prompts()[:24]
    specs = make_specs(prompts, NUM_SPECS, SEED)
    plan = {
        "concurrency": CONCURRENCY,
        "seed": SEED,
        "prompts": prompts,
        "num_specs": NUM_SPECS,
        "expected": [offline(demo_engine, spec) for spec in specs],
    }
    assert {reason for _, reason in plan["expected"]} == {"stop", "length"}
    assert len({tuple(ids) for ids, _ in plan["expected"]}) > NUM_SPECS / 2
    arguments = ("--max-running-requests", "8", "--context-length", "1024", "--speculative-ddtree-budget", "8")
    with server_process(*arguments, "--metrics-port", "0", "--log-requests", "none") as server:
        totals = {}
        for part, requests in (("first", REQUESTS // 4), ("rest", REQUESTS - REQUESTS // 4)):
            file = tmp_path / f"{part}.json"
            file.write_text(json.dumps(plan | {"address": server.address, "requests": requests}))
            command = [sys.executable, "-m", "tests.serving.load_client", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S)
            assert done.returncode == 0, done.stderr
            score = json.loads(done.stdout)
            assert score["num_wrong"] == 0, score["wrong"]
            for kind, count in score["counts"].items():
                totals[kind] = totals.get(kind, 0) + count
            if part == "first":
                before = resident_bytes(server.process)
        assert sum(totals.values()) == REQUESTS
        assert totals["full"] == 0.8 * REQUESTS
        assert totals["invalid"] == 0.05 * REQUESTS
        assert totals["cancelled"] > 0.05 * REQUESTS
        assert totals["late"] > 0.02 * REQUESTS
        print(totals, "resident MB", before >> 20, resident_bytes(server.process) >> 20)
        assert resident_bytes(server.process) < before + MEMORY_BYTES
