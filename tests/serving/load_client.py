"""The client process of the load test: many requests at a time, some of them cancelled, late or wrong.

python -m tests.serving.load_client PLAN.json   -> one JSON object on stdout: counts, and what was not as it must be.

PLAN.json: address, requests, concurrency, seed, prompts, num_specs, expected (tokens and finish reason of each spec).
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import sys
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from tests.serving.load_specs import INVALID, Spec, make_specs

KINDS = ["full"] * 16 + ["cancelled"] * 2 + ["late"] + ["invalid"]  # 80, 10, 5 and 5 %
DEADLINE_S = 0.05


class Load:
    """Runs the plan and keeps the score."""

    def __init__(self, plan: dict[str, Any]):
        self.specs = make_specs(plan["prompts"], plan["num_specs"], plan["seed"])
        self.expected: list[tuple[list[int], str]] = plan["expected"]
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def check(self, ok: bool, request_id: str, what: str) -> None:
        if not ok:
            self.wrong.append(f"{request_id}: {what}")

    async def one(self, stub: pb_grpc.VllmEngineStub, i: int, rng: random.Random) -> None:
        kind, which = KINDS[i % len(KINDS)], rng.randrange(len(self.specs))
        spec, request_id = self.specs[which], f"load-{i}"
        expected, reason = self.expected[which]
        if kind == "invalid":
            await self._invalid(stub, spec, request_id, *INVALID[i // len(KINDS) % len(INVALID)])
            return
        stream = kind != "full" or rng.random() < 0.7
        call = stub.Generate(
            spec.message(request_id, stream=stream), timeout=DEADLINE_S * rng.random() if kind == "late" else None
        )
        leave_after = rng.randrange(3) if kind == "cancelled" else None
        got: list[int] = []
        complete = None
        try:
            if leave_after == 0:  # perhaps still in the queue
                await asyncio.sleep(0.1 * rng.random())
                call.cancel()
            async for response in call:
                if response.HasField("complete"):
                    complete = response.complete
                else:
                    got.extend(response.chunk.token_ids)
                    leave_after = None if leave_after is None else leave_after - 1
                    if leave_after == 0:
                        call.cancel()
        except asyncio.CancelledError:
            self.check(kind == "cancelled", request_id, "cancelled, and nobody had asked for it")
        except grpc.aio.AioRpcError as error:
            allowed = {"cancelled": "CANCELLED", "late": "DEADLINE_EXCEEDED"}.get(kind)
            self.check(error.code().name == allowed, request_id, f"{kind}: {error.code().name} {error.details()}")
        self.check(got == expected[: len(got)], request_id, f"{spec}: got {got}, expected {expected}")
        if complete is None:
            self.counts[kind] += 1
            self.check(kind != "full", request_id, "no end")
            return
        self.counts["full" if kind == "full" else f"{kind}, but done before"] += 1
        self.check(list(complete.output_ids) == expected, request_id, f"{spec}: {complete.output_ids}, {expected}")
        self.check(not stream or got == expected, request_id, f"chunks {got} against {expected}")
        self.check(complete.finish_reason == reason, request_id, f"finish reason {complete.finish_reason}")
        self.check(complete.completion_tokens == len(expected), request_id, "token count")

    async def _invalid(
        self, stub: pb_grpc.VllmEngineStub, spec: Spec, request_id: str, field: str, value: Any, status: str
    ) -> None:
        message = spec.message(request_id, stream=True)
        if spec.grammar is not None:
            message.sampling_params.ClearField(message.sampling_params.WhichOneof("constraint"))
        setattr(message.sampling_params, field, value)
        try:
            async for _ in stub.Generate(message):
                pass
            self.check(False, request_id, f"{field}={value} was accepted")
        except grpc.aio.AioRpcError as error:
            ok = error.code().name == status and field in error.details()
            self.check(ok, request_id, f"{field}={value}: {error.code().name} {error.details()}")
        self.counts["invalid"] += 1


async def run(plan: dict[str, Any]) -> Load:
    load, waiting = Load(plan), iter(range(plan["requests"]))

    async def worker(stub: pb_grpc.VllmEngineStub, number: int) -> None:
        rng = random.Random(plan["seed"] * 1000 + number)
        for i in waiting:
            await load.one(stub, i, rng)

    async with grpc.aio.insecure_channel(plan["address"]) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        await asyncio.gather(*(worker(stub, number) for number in range(plan["concurrency"])))
        loads = (await stub.GetLoads(pb.GetLoadsRequest())).loads[0]
        for _ in range(100):  # the last cancelled requests leave between two rounds
            if loads.num_total_reqs == 0:
                break
            await asyncio.sleep(0.1)
            loads = (await stub.GetLoads(pb.GetLoadsRequest())).loads[0]
        load.check(loads.num_total_reqs == 0, "end", f"{loads.num_running_reqs} running, {loads.num_waiting_reqs} wait")
        load.check(loads.num_used_tokens == 0, "end", f"{loads.num_used_tokens} tokens in use")
    return load


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    load = asyncio.run(run(plan))
    print(json.dumps({"counts": dict(load.counts), "wrong": load.wrong[:20], "num_wrong": len(load.wrong)}))


if __name__ == "__main__":
    main()
