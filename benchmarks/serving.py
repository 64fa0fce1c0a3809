"""Throughput and latency of the server over gRPC, by how many requests run at a time.

python benchmarks/serving.py                             # the shipped pair, greedy, 1, 2, 4, 8 and 16 at a time
python benchmarks/serving.py --budget 4 --repeats 1      # other options of the server after --server
python benchmarks/serving.py --server --speculative-algorithm none

Starts `python -m serving` as a process of its own; this process is the client. Every output is compared with that of
the first concurrency: the same tokens whatever runs beside it (float32). This process never touches a device.
"""

import argparse
import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from ddtree_jax.bench import held_out_prompts

START_S = 900


@contextlib.contextmanager
def server(arguments: list[str]) -> Iterator[str]:
    """A server process; gives its address once it takes requests, and ends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "serving", "--port", "0", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        found = re.search(r" at (\S+:\d+)", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line!r}")
        with grpc.insecure_channel(found[1]) as channel:
            stub, until = pb_grpc.VllmEngineStub(channel), time.monotonic() + START_S
            while not _healthy(stub):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the server ended, or was not ready in time")
                time.sleep(0.2)
        yield found[1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def _healthy(stub: pb_grpc.VllmEngineStub) -> bool:
    try:
        return stub.HealthCheck(pb.HealthCheckRequest()).healthy
    except grpc.RpcError:
        return False


async def measure(address: str, prompts: list[str], concurrency: int, new_tokens: int) -> tuple[dict, list[list[int]]]:
    """Runs each prompt once, so many at a time. Returns the figures and the outputs."""
    outputs: list[list[int]] = [[] for _ in prompts]
    first, gaps, per_token, acceptance = [], [], [], []
    waiting = iter(range(len(prompts)))

    async def worker(stub: pb_grpc.VllmEngineStub) -> None:
        for i in waiting:
            sampling = pb.SamplingParams(temperature=0.0, max_tokens=new_tokens)
            request = pb.GenerateRequest(text=prompts[i], sampling_params=sampling, stream=True)
            last = started = time.perf_counter()
            call = stub.Generate(request)
            async for response in call:
                now, ids = time.perf_counter(), response.chunk.token_ids
                if not ids:
                    continue
                if outputs[i]:
                    gaps.append(now - last)
                    per_token.extend([(now - last) / len(ids)] * len(ids))
                else:
                    first.append(now - started)
                outputs[i].extend(ids)
                last = now
            trailing = {name: value for name, value in await call.trailing_metadata()}
            acceptance.append(float(trailing["mean_acceptance_length"]))

    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        started = time.perf_counter()
        await asyncio.gather(*(worker(stub) for _ in range(concurrency)))
        seconds = time.perf_counter() - started
    figures = {
        "rate": sum(map(len, outputs)) / seconds,
        "acceptance": statistics.fmean(acceptance),
        "first": quantiles(first),
        "gap": quantiles(gaps),
        "token": quantiles(per_token),
    }
    return figures, outputs


def quantiles(seconds: list[float]) -> tuple[float, float, float]:
    """Milliseconds: 50th, 90th and 99th percentile."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return 1e3 * cuts[49], 1e3 * cuts[89], 1e3 * cuts[98]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--requests", type=int, default=32, help="of each measurement")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each; the fastest counts")
    parser.add_argument("--budget", type=int, help="tree nodes besides the root")
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=[], help="options of the server, at the end")
    options = parser.parse_args()
    levels = [int(part) for part in options.concurrency.split(",")]
    prompts = held_out_prompts()[: options.requests]
    arguments = ["--max-running-requests", str(max(levels)), "--context-length", "1024", "--disable-radix-cache"]
    arguments += [] if options.budget is None else ["--speculative-ddtree-budget", str(options.budget)]
    arguments += ["--log-level", "error", "--log-requests", "none", *options.server]
    print(f"{len(prompts)} held-out prompts, {options.max_new_tokens} new tokens, greedy")
    print(f"server: {' '.join(arguments)}")
    print("ms: 50th / 90th / 99th percentile; gap: between chunks of a stream; tokens: how many a round, mean")
    print(f"{'streams':>7} {'tokens/s':>9} {'speed-up':>9} {'tokens':>7} {'first token ms':>18} {'gap ms':>18}", end="")
    print(f" {'ms a token':>18} {'same':>7}")
    base, expected = None, None
    with server(arguments) as address:
        asyncio.run(measure(address, prompts, max(levels), 8))  # the last programs are compiled, the channels warm
        for level in levels:
            runs = [
                asyncio.run(measure(address, prompts, level, options.max_new_tokens)) for _ in range(options.repeats)
            ]
            figures, outputs = max(runs, key=lambda run: run[0]["rate"])
            base, expected = base or figures["rate"], expected or outputs
            same = sum(all(run[1][i] == tokens for run in runs) for i, tokens in enumerate(expected))
            columns = [" / ".join(f"{ms:.1f}" for ms in figures[name]) for name in ("first", "gap", "token")]
            print(
                f"{level:7} {figures['rate']:9.1f} {figures['rate'] / base:8.2f}x {figures['acceptance']:7.2f} "
                f"{columns[0]:>18} {columns[1]:>18} {columns[2]:>18} {same:4}/{len(prompts)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
