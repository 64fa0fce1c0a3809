"""The hand-over from the device thread to the event loop."""

import asyncio

from serving import errors
from serving.jobs import Tokens
from serving.outbox import Outbox
from tests.serving.harness import finished, run


def test_what_waits_is_one_piece() -> None:
    async def test() -> None:
        outbox, calls = Outbox(asyncio.get_running_loop()), []
        outbox.when_job_ended(lambda: calls.append("ended"))

        def device() -> None:
            for i in range(100):
                outbox.put(Tokens((i, i), 5))
            outbox.put(finished(3, 200))

        await asyncio.to_thread(device)
        piece = await outbox.take()
        assert piece.token_ids == tuple(i // 2 for i in range(200)) and piece.num_cached_tokens == 5
        assert piece.end == finished(3, 200) and calls == ["ended"] and outbox.job_ended
        again = await outbox.take()
        assert again.token_ids == () and again.end == piece.end

    run(test())


def test_a_cut_ends_the_stream_and_not_the_job() -> None:
    async def test() -> None:
        outbox, calls = Outbox(asyncio.get_running_loop()), []
        outbox.put(Tokens((1,), 0))
        outbox.cut(errors.NotReadyError("over"))
        outbox.put(Tokens((2,), 0))
        outbox.when_job_ended(lambda: calls.append("ended"))
        piece = await outbox.take()
        assert piece.token_ids == (1,) and str(piece.end.error) == "over"
        assert str(outbox.failure) == "over" and not outbox.job_ended and not calls
        outbox.put(finished(1, 1))
        outbox.when_job_ended(lambda: calls.append("at once"))
        assert calls == ["at once"]
        assert str((await outbox.take()).end.error) == "over"

    run(test())


def test_without_an_event_loop_nothing_is_raised() -> None:
    async def make() -> Outbox:
        return Outbox(asyncio.get_running_loop())

    outbox = run(make())
    outbox.put(Tokens((1,), 0))
    assert not outbox.job_ended
    outbox.put(finished(1, 1))
    assert outbox.job_ended
