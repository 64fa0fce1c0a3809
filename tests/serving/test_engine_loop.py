"""The device thread: many requests together give what each gives alone, and every way to end one."""

import dataclasses
import re
import threading
import time

import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import Grammar, algorithm
from ddtree_jax import requests as admission
from ddtree_jax import slots as device
from ddtree_jax.errors import InvariantError
from ddtree_jax.grammar_walk import SequenceGrammar
from serving import engine_loop, runner
from serving.engine_loop import DeviceThread
from serving.errors import CancelledError, DeadlineError, InternalError, NotReadyError, QueueFullError
from serving.jobs import Failed, Finished
from serving.sequences import RunningSequence
from tests.serving.conftest import WAIT_S, Listener, Loop

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(10, 58, size).tolist() for size in (1, 3, 70, 33, 12, 100, 32, 5)]
SETTINGS = [
    {},
    {"temperature": 1.5, "seed": 11},
    {"temperature": 0.8, "top_p": 0.7, "seed": -3},
    {"stop_token_ids": []},
    {"grammar": Grammar.regex("[a-d]{2,6}-[0-9]{3,9}"), "stop_token_ids": [0]},
    {"grammar": Grammar.regex("[a-z]{1,30}"), "stop_token_ids": [0], "temperature": 1.2, "min_p": 0.3, "seed": 5},
    {"stop_token_ids": list(range(40, 48))},
    {"temperature": 2.0, "top_k": 3, "seed": 2**40, "stop_token_ids": []},
]
LENGTHS = [20, 1, 35, 7, 20, 24, 30, 13]


@pytest.fixture(scope="module")
def alone(text_engine):
    """What `generate` gives for each prompt with its settings."""
    return [
        ddtree_jax.generate(text_engine, prompt, length, "ddtree", 4, grammar_implementation=implementation, **options)
        for prompt, length, options in zip(PROMPTS, LENGTHS, SETTINGS, strict=True)
        for implementation in ["host" if "grammar" in options else "auto"]
    ]


@pytest.fixture(scope="module")
def plain_loop(text_engine):
    """One loop without speculation, left as it was found."""
    loop = Loop(text_engine, algorithm=ddtree_jax.SpeculativeAlgorithm.NONE, budget=0, max_running_requests=2)
    loop.thread.start()
    assert loop.thread.wait_until_ready(WAIT_S)
    yield loop
    loop.thread.stop()


class Gate(Listener):
    """Holds the device thread at the first event of a job until it is opened."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def __call__(self, event):
        super().__call__(event)
        assert self.go.wait(WAIT_S)


def held(loop, prompt=PROMPTS[1], **options):
    """A running job that holds the device thread after its first token."""
    gate = Gate()
    loop.ask(prompt, listener=gate, stop_token_ids=[], **options)
    assert gate.first.wait(WAIT_S)
    return gate


def test_together_as_alone(shared_loop, alone):
    # Twice as many as there are slots, and then the same in another order: each slot has seen others before. Three in a
    # round take the program of four: the fourth row is a slot that is free, or whose prompt is not through.
    for order in (range(8), (6, 2, 7, 0, 5, 3, 1, 4)):
        listeners = {i: shared_loop.ask(PROMPTS[i], max_new_tokens=LENGTHS[i], **SETTINGS[i]) for i in order}
        for i, listener in listeners.items():
            end = listener.finished()
            assert listener.token_ids == alone[i].token_ids, i
            assert end.finish_reason == alone[i].finish_reason
            assert end.stats.acceptance_lengths == alone[i].stats.acceptance_lengths, i
            assert end.stats.num_output_tokens == len(alone[i].token_ids)
            stopped = alone[i].finish_reason == "stop"
            assert end.matched_stop == (alone[i].token_ids[-1] if stopped else None)
            assert end.num_accepted_draft_tokens == sum(alone[i].stats.acceptance_lengths) - alone[i].stats.num_rounds
            assert 1 <= end.mean_tree_size <= 5 or end.stats.num_rounds == 0
    assert shared_loop.thread.load().running == 0
    records = shared_loop.records.rounds
    assert {(4, 3), (4, 4)} <= {(record.width, len(record.acceptance_lengths)) for record in records}
    # Every sequence emits in every round, those without a grammar beside those with one, too.
    assert all(len(record.acceptance_lengths) == len(record.tree_sizes) for record in records)
    assert {"round", "draft", "verify", "finish"} <= set().union(*(record.stage_s for record in records))
    assert {record.outcome for record in shared_loop.records.requests} >= {"stop", "length"}


def test_a_long_prompt_holds_a_stream_up_by_a_chunk_at_most(shared_loop):
    stream = held(shared_loop, max_new_tokens=40)
    before, first_step = len(shared_loop.records.prefills), len(shared_loop.records.steps)
    long = shared_loop.ask(RNG.integers(10, 58, 130).tolist(), max_new_tokens=2)
    stream.go.set()
    long.finished()
    stream.finished()
    assert len(shared_loop.records.prefills) - before == 5
    assert max(shared_loop.records.prefills[before:]) <= 32
    steps = " ".join(shared_loop.records.steps[first_step:])
    assert "prefill prefill" not in steps and steps.count("prefill round") == 5


def test_the_first_round_after_the_warm_up_compiles_nothing(shared_loop):
    programs = (device.draft_slots, device.verify_slots, device.finish_slots, device.prefill_slots, device.first_tokens)
    before = [program._cache_size() for program in programs]
    listeners = [shared_loop.ask(PROMPTS[3], max_new_tokens=9, **SETTINGS[i]) for i in (0, 2, 4)]
    for listener in listeners:
        listener.finished()
    assert [program._cache_size() for program in programs] == before


@pytest.mark.slow
def test_sequences_of_different_extents_share_a_round(make_loop, monkeypatch, alone):
    monkeypatch.setattr(device, "FIRST_EXTENT", 32)
    assert device.extents(192) == (32, 128, 192)
    loop = make_loop(max_running_requests=2)
    for order in ((0, 2, 3, 5), (5, 3, 2, 0)):
        listeners = {i: loop.ask(PROMPTS[i], max_new_tokens=LENGTHS[i], **SETTINGS[i]) for i in order}
        for i, listener in listeners.items():
            assert listener.finished().stats.acceptance_lengths == alone[i].stats.acceptance_lengths, i
            assert listener.token_ids == alone[i].token_ids, i


@pytest.mark.parametrize("algorithm", ["none", pytest.param("dflash", marks=pytest.mark.slow)])
def test_other_algorithms(make_loop, request, text_engine, algorithm):
    member = ddtree_jax.SpeculativeAlgorithm.parse(algorithm)
    if algorithm == "none":
        loop = request.getfixturevalue("plain_loop")
    else:
        loop = make_loop(algorithm=member, budget=0, max_running_requests=2)
    listeners = [loop.ask(PROMPTS[i], max_new_tokens=12, **SETTINGS[i]) for i in (0, 2, 4)]
    for i, listener in zip((0, 2, 4), listeners, strict=True):
        implementation = "host" if "grammar" in SETTINGS[i] else "auto"
        expected = ddtree_jax.generate(
            text_engine, PROMPTS[i], 12, algorithm, 0, grammar_implementation=implementation, **SETTINGS[i]
        )
        assert listener.finished().stats.acceptance_lengths == expected.stats.acceptance_lengths
        assert listener.token_ids == expected.token_ids


def test_stop_strings_end_the_output_with_the_token_that_completes_them(shared_loop, text_engine):
    free = shared_loop.ask(PROMPTS[5], max_new_tokens=24, stop_token_ids=[])
    free.finished()
    texts = [text_engine.tokenizer.decode(free.token_ids[:n]) for n in range(len(free.token_ids) + 1)]
    wanted = texts[-1][4:7]
    expected = next(n for n, text in enumerate(texts) if wanted in text)
    stopped = shared_loop.ask(PROMPTS[5], max_new_tokens=24, stop_token_ids=[], stop_strings=("\x00", wanted))
    assert stopped.finished().matched_stop == wanted
    assert stopped.finished().finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[:expected]


def test_E60_a_shared_prefix_is_not_computed_again_and_changes_nothing(make_loop):
    loop = make_loop()
    prompt = PROMPTS[5]
    first = loop.ask(prompt, max_new_tokens=20, stop_token_ids=[])
    assert first.finished().num_cached_tokens == 0
    computed = sum(loop.records.prefills)
    again = loop.ask(prompt, max_new_tokens=20, stop_token_ids=[])
    assert again.finished().num_cached_tokens == len(prompt) - 1
    assert sum(loop.records.prefills) == computed + 1
    assert again.token_ids == first.token_ids
    # The drafter's context is reused with the target's: else the drafts would be worse.
    assert again.finished().stats.acceptance_lengths == first.finished().stats.acceptance_lengths

    # A second turn: the answer is part of what is reused, but for its newest token, which is in no cache.
    turn = prompt + first.token_ids + [20, 21, 22]
    longer = loop.ask(turn, max_new_tokens=20, stop_token_ids=[])
    assert longer.finished().num_cached_tokens == len(prompt) + 19
    fresh = make_loop(prefix_reuse=False).ask(turn, max_new_tokens=20, stop_token_ids=[])
    assert fresh.finished().num_cached_tokens == 0
    assert longer.token_ids == fresh.token_ids
    assert longer.finished().stats.acceptance_lengths == fresh.finished().stats.acceptance_lengths
    assert 0 < loop.thread.load().cache_hit_rate < 1


def test_E60_a_prefix_is_copied_from_a_sequence_that_still_runs(make_loop, alone):
    loop = make_loop()
    running = loop.ask(PROMPTS[5], max_new_tokens=50, stop_token_ids=[])
    assert running.first.wait(WAIT_S)
    listeners = [loop.ask(PROMPTS[5][:90] + [tail], max_new_tokens=20, stop_token_ids=[]) for tail in (30, 31)]
    for tail, listener in zip((30, 31), listeners, strict=True):
        assert listener.finished().num_cached_tokens == 90
        again = make_loop(prefix_reuse=False, max_running_requests=1).ask(
            PROMPTS[5][:90] + [tail], max_new_tokens=20, stop_token_ids=[]
        )
        assert listener.finished().stats.acceptance_lengths == again.finished().stats.acceptance_lengths
        assert listener.token_ids == again.token_ids
    assert len(running.token_ids) == 50 or not running.ended.is_set()


# --- ends that are not the output's own ------------------------------------------------------------------------------


def test_abort_while_waiting_in_prefill_in_decode_twice_and_unknown(shared_loop, monkeypatch):
    def after_its_first_chunk(num_tokens, seconds):
        monkeypatch.undo()
        shared_loop.thread.abort("prefilling")

    gate = held(shared_loop, request_id="decoding", max_new_tokens=60)
    prefilling = shared_loop.ask(RNG.integers(10, 58, 130).tolist(), request_id="prefilling")
    others = [shared_loop.ask(PROMPTS[0], max_new_tokens=30, stop_token_ids=[]) for _ in range(2)]
    waiting = shared_loop.ask(PROMPTS[0], request_id="waiting")
    for request_id in ("waiting", "unknown", "decoding", "decoding"):
        shared_loop.thread.abort(request_id)
    monkeypatch.setattr(shared_loop.records, "prefill_finished", after_its_first_chunk)
    gate.go.set()
    assert isinstance(gate.error(), CancelledError)
    assert isinstance(waiting.error(), CancelledError)
    assert isinstance(prefilling.error(), CancelledError)
    assert prefilling.token_ids == []
    shared_loop.thread.abort("decoding")  # has ended
    for other in others:
        assert other.finished().finish_reason == "length"
    # The slots are free again, and an id may be used again.
    assert shared_loop.ask(PROMPTS[0], request_id="decoding", max_new_tokens=2).finished()
    assert shared_loop.thread.load().running == 0


def test_deadlines_are_checked_between_rounds(shared_loop):
    deadline = time.monotonic() + 0.3
    gate = held(shared_loop, request_id="late", max_new_tokens=60, deadline=deadline)
    waiting = shared_loop.ask(PROMPTS[0], deadline=time.monotonic() - 1.0)
    while time.monotonic() < deadline:
        threading.Event().wait(0.02)
    gate.go.set()
    assert isinstance(gate.error(), DeadlineError)
    assert isinstance(waiting.error(), DeadlineError)
    assert [r.outcome for r in shared_loop.records.requests[-2:]].count("DEADLINE_EXCEEDED") == 2


def test_the_queue_is_bounded(make_loop):
    loop = make_loop(max_running_requests=1, max_queued_requests=2)
    gate = held(loop, max_new_tokens=3)
    queued = [loop.ask(PROMPTS[0], max_new_tokens=2) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait, allowed are 2"):
        loop.ask(PROMPTS[0])
    with pytest.raises(ValueError, match="in use"):
        loop.ask(PROMPTS[0], request_id="job-2")
    gate.go.set()
    for listener in queued:
        assert listener.finished()
    assert loop.ask(PROMPTS[0], max_new_tokens=2).finished()


def test_H80_loading_draining_and_stopped_refuse_and_running_requests_end(make_loop):
    loop = make_loop(start=False)
    with pytest.raises(NotReadyError, match="loading"):
        loop.ask(PROMPTS[0])
    loop.thread.start()
    assert loop.thread.wait_until_ready(WAIT_S)
    gate = held(loop, max_new_tokens=20)
    loop.thread.drain()
    assert loop.thread.state == "draining"
    with pytest.raises(NotReadyError, match="draining"):
        loop.ask(PROMPTS[0])
    gate.go.set()
    assert gate.finished().finish_reason == "length"
    assert told(loop, lambda load: load.state == "draining" and load.running == 0)
    loop.thread.stop()
    loop.thread.stop()
    with pytest.raises(NotReadyError, match="stopped"):
        loop.ask(PROMPTS[0])


def test_H80_stop_cuts_what_runs_and_what_waits(make_loop):
    loop = make_loop(max_running_requests=1)
    gate = held(loop, max_new_tokens=60)
    waiting = loop.ask(PROMPTS[0])
    stopper = threading.Thread(target=loop.thread.stop)
    stopper.start()
    while loop.thread.state != "stopped":
        threading.Event().wait(0.01)
    gate.go.set()
    stopper.join(WAIT_S)
    assert isinstance(gate.error(), NotReadyError)
    assert isinstance(waiting.error(), NotReadyError)


def test_regression_g72_a_constrained_batch_in_a_round_without_rows_is_a_fault_of_that_batch(
    make_loop, monkeypatch, caplog, alone
):
    """The round's own guard, with the admission that comes before it taken away."""
    member = ddtree_jax.SpeculativeAlgorithm.DDTREE
    with monkeypatch.context() as patch:
        patch.setitem(
            algorithm.CAPABILITIES, member, dataclasses.replace(algorithm.CAPABILITIES[member], grammar=False)
        )
        patch.setattr(admission, "require", lambda *_: None)
        loop = make_loop()
        bound = loop.ask(PROMPTS[4], request_id="bound", **SETTINGS[4])
        assert isinstance(bound.error(), InternalError)
    assert "DDTREE is running a batch that has grammar constraints" in caplog.text and "requests bound" in caplog.text
    free = loop.ask(PROMPTS[3], max_new_tokens=LENGTHS[3], **SETTINGS[3])
    assert free.finished() and free.token_ids == alone[3].token_ids


@pytest.mark.parametrize("program", ["draft_slots", "finish_slots", "prefill_slots", "open_slot"])
@pytest.mark.parametrize("donated", [False, True])
def test_a_fault_ends_those_it_hit_and_no_others(make_loop, monkeypatch, alone, program, donated):
    loop = make_loop()
    assert loop.ask(PROMPTS[5], max_new_tokens=1).finished()
    real = getattr(device, program)
    broken = threading.Event()
    in_round = program in ("draft_slots", "finish_slots")
    spared = [True] * in_round  # the round of `gate` alone, before `other` is there

    def faulty(*args, **kwargs):
        if not broken.is_set() or (spared and spared.pop()):
            return real(*args, **kwargs)
        broken.clear()
        if donated:
            real(*args, **kwargs)
        raise RuntimeError("a secret of the program")

    monkeypatch.setattr(device, program, faulty)
    gate = held(loop, request_id="hit", max_new_tokens=60)
    broken.set()
    other = loop.ask(PROMPTS[3], request_id="other", max_new_tokens=LENGTHS[3], **SETTINGS[3])
    gate.go.set()
    if in_round:
        assert isinstance(gate.error(), InternalError)
        assert "hit" in str(gate.error())
        assert "secret" not in str(gate.error())
        # Behind its first chunk when the caches went: it began anew.
        assert other.finished().stats.acceptance_lengths == alone[3].stats.acceptance_lengths
        assert other.token_ids == alone[3].token_ids
    else:
        assert isinstance(other.error(), InternalError)
        # The caches are lost where the program had them, and with them the other stream.
        assert isinstance(gate.wait(), Failed if donated else Finished)
    prefix = loop.ask(PROMPTS[5], max_new_tokens=1).finished().num_cached_tokens
    is_lost = donated and program != "draft_slots"  # which only reads
    assert prefix == (0 if is_lost else len(PROMPTS[5]) - 1)
    after = loop.ask(PROMPTS[3], max_new_tokens=LENGTHS[3], **SETTINGS[3])
    assert after.finished() and after.token_ids == alone[3].token_ids
    assert loop.thread.load().running == 0
    assert loop.thread.state == "ready"


@pytest.mark.parametrize(("where", "name"), [(RunningSequence, "open"), (device, "open_slot")])
def test_a_request_that_could_not_be_opened_leaves_no_promise_about_its_slot(
    make_loop, monkeypatch, caplog, where, name
):
    loop = make_loop()
    gate = held(loop, prompt=PROMPTS[5], max_new_tokens=60)

    def faulty(*args, **kwargs):
        raise RuntimeError("a secret of the program")

    with monkeypatch.context() as patch:
        # The prefix that was to be copied is in no slot afterwards: not in that of the request, nor in the other one.
        patch.setattr(where, name, faulty)
        patch.setattr(device, "draft_slots", faulty)
        hit = loop.ask(PROMPTS[5], request_id="hit")
        gate.go.set()
        assert isinstance(hit.error(), InternalError) and "hit" in str(hit.error()) and "secret" not in str(hit.error())
        assert any(re.fullmatch("fault in opening .* hit", message) for message in caplog.messages)
        assert isinstance(gate.error(), InternalError)
    assert loop.ask(PROMPTS[5], max_new_tokens=2).finished().num_cached_tokens == 0
    assert loop.thread.load().running == 0


def test_a_fault_outside_the_programs_ends_what_runs_and_the_next_request_works(make_loop, monkeypatch, alone):
    loop = make_loop()
    assert loop.ask(PROMPTS[5], max_new_tokens=1).finished()
    gate = held(loop, max_new_tokens=60)

    def faulty(record):
        monkeypatch.undo()
        raise RuntimeError("a secret of the program")

    monkeypatch.setattr(loop.records, "round_finished", faulty)
    gate.go.set()
    assert isinstance(gate.error(), InternalError)
    assert loop.ask(PROMPTS[5], max_new_tokens=1).finished().num_cached_tokens == 0
    after = loop.ask(PROMPTS[3], max_new_tokens=LENGTHS[3], **SETTINGS[3])
    assert after.finished() and after.token_ids == alone[3].token_ids


def test_without_room_for_new_caches_the_thread_ends_and_so_do_its_requests(make_loop, monkeypatch):
    loop = make_loop(max_running_requests=1)
    gate = held(loop, max_new_tokens=60)
    waiting = loop.ask(PROMPTS[0])

    def faulty(*args, **kwargs):
        raise MemoryError("no room")

    monkeypatch.setattr(loop.records, "round_finished", faulty)
    monkeypatch.setattr(device, "make_pool", faulty)
    told = threading.Event()
    loop.thread.watch(told.set)
    gate.go.set()
    assert isinstance(gate.error(), InternalError)
    assert isinstance(waiting.error(), InternalError)
    assert loop.thread.state == "stopped"
    with pytest.raises(NotReadyError, match="stopped"):
        loop.ask(PROMPTS[0])
    assert told.wait(WAIT_S)
    late = []
    loop.thread.watch(lambda: late.append(True))
    assert late == [True]


def told(loop, wanted):
    """Waits until the observer has been told of a load that is `wanted`."""
    while not wanted(load := loop.records.loads.get(timeout=WAIT_S)):
        pass
    return load


def test_the_observer_hears_of_the_state_before_the_first_request_and_of_the_rate_after_the_last(
    make_loop, monkeypatch
):
    monkeypatch.setattr(engine_loop, "RATE_WINDOW_S", 1.0)
    loop = make_loop()
    first = told(loop, lambda load: load.state == "ready")
    assert (first.running, first.max_running_requests, first.max_tokens) == (0, 4, 640)
    loop.ask(PROMPTS[0], max_new_tokens=5, stop_token_ids=[]).finished()
    assert told(loop, lambda load: load.tokens_per_second > 0)
    assert told(loop, lambda load: load.tokens_per_second == 0).running == 0


def test_a_request_longer_than_its_slot_is_refused(shared_loop):
    with pytest.raises(ValueError, match="got 161 tokens, prompt and output together, allowed are 160"):
        shared_loop.ask(PROMPTS[5], max_new_tokens=61)


def raising(error):
    def method(*args):
        raise error

    return method


@pytest.mark.parametrize(
    ("name", "broken", "told"),
    [
        ("is_dead", property(raising(ValueError("grammar: too complex at this place of the text: x"))), "too complex"),
        ("advance", raising(InvariantError("token 7 was emitted and the grammar does not allow it there")), "a fault"),
    ],
)
def test_a_grammar_that_fails_behind_a_token_ends_its_own_request_alone(
    shared_loop, monkeypatch, alone, name, broken, told
):
    gate = Gate()
    free = shared_loop.ask(PROMPTS[3], listener=gate, max_new_tokens=LENGTHS[3], **SETTINGS[3])
    assert gate.first.wait(WAIT_S)
    bound = shared_loop.ask(PROMPTS[4], max_new_tokens=20, **SETTINGS[4])
    with monkeypatch.context() as patch:
        patch.setattr(SequenceGrammar, name, broken)
        gate.go.set()
        end = bound.wait()
    assert told in str(end.error)
    assert isinstance(end, Finished if name == "is_dead" else Failed)
    assert free.finished() and free.token_ids == alone[3].token_ids
    after = shared_loop.ask(PROMPTS[4], max_new_tokens=20, **SETTINGS[4])
    assert after.finished() and after.token_ids == alone[4].token_ids
    assert shared_loop.thread.load().running == 0


@pytest.mark.parametrize("algorithm", ["ddtree", "none"])
def test_a_grammar_that_stalls_the_others_ends_its_own_request_alone(
    shared_loop, plain_loop, monkeypatch, alone, algorithm
):
    loop = shared_loop if algorithm == "ddtree" else plain_loop
    gate = Gate()
    free = loop.ask(PROMPTS[3], listener=gate, max_new_tokens=LENGTHS[3], **SETTINGS[3])
    assert gate.first.wait(WAIT_S)
    bound = loop.ask(PROMPTS[4], max_new_tokens=20, **SETTINGS[4])
    with monkeypatch.context() as patch:
        patch.setattr(runner, "MAX_GRAMMAR_S", 0.0)
        gate.go.set()
        end = bound.finished()
    assert (end.finish_reason, "s for one round, allowed are 0" in end.error) == ("error", True)
    assert (end.stats.num_rounds, len(bound.token_ids)) == (0, 1)
    assert free.finished() and free.token_ids == alone[3].token_ids
    after = loop.ask(PROMPTS[4], max_new_tokens=20, **SETTINGS[4])
    assert after.finished() and after.token_ids == alone[4].token_ids


def test_an_abort_that_comes_too_late_is_not_for_the_next_job_of_its_id(shared_loop):
    following = []

    class Late(Listener):
        def __call__(self, event):
            if not self.events:
                shared_loop.thread.abort("again")  # it has emitted its only token, and ends with it
            super().__call__(event)
            if self.ended.is_set():
                following.append(shared_loop.ask(PROMPTS[0], request_id="again", max_new_tokens=3))

    assert shared_loop.ask(PROMPTS[0], request_id="again", max_new_tokens=1, listener=Late()).finished()
    assert following[0].finished().finish_reason == "length"


def test_without_caches_the_thread_ends_and_everybody_is_told(make_loop, monkeypatch, caplog):
    loop = make_loop(max_running_requests=1)
    gate = held(loop, max_new_tokens=60)
    waiting = loop.ask(PROMPTS[0])
    real = device.finish_slots

    def faulty(*args, **kwargs):
        real(*args, **kwargs)
        raise RuntimeError("a secret of the program")

    monkeypatch.setattr(device, "finish_slots", faulty)
    monkeypatch.setattr(device, "make_pool", raising(MemoryError("no room")))
    gate.go.set()
    for listener in (gate, waiting):
        assert isinstance(listener.error(), InternalError) and "secret" not in str(listener.error())
    with pytest.raises(NotReadyError, match="stopped"):
        loop.ask(PROMPTS[0])
    assert "no room" in caplog.text


def test_a_listener_that_raises_harms_nobody(shared_loop):
    def raising(event):
        raise RuntimeError("listener")

    shared_loop.ask(PROMPTS[0], max_new_tokens=5, listener=raising)
    assert shared_loop.ask(PROMPTS[0], max_new_tokens=5).finished()


@pytest.mark.parametrize("last", ["prefill of 32 tokens", "the round of 2 sequences"])
def test_a_warm_up_ends_behind_the_program_at_which_it_is_told_to(make_loop, last):
    loop, messages = make_loop(start=False), []

    def progress(message):
        messages.append(message)
        if last in message:
            thread.drain()

    thread = DeviceThread(loop.engine, loop.settings, loop.records, progress)
    thread.start()
    assert thread.wait_until_ready(WAIT_S) is False
    thread.stop()
    assert messages[-1] == f"compiling {last} ..."


def test_an_engine_that_cannot_start_refuses(text_engine, make_loop, monkeypatch):
    loop = make_loop(start=False)
    monkeypatch.setattr(device, "make_pool", lambda *args: (_ for _ in ()).throw(MemoryError("no room")))
    loop.thread.start()
    assert loop.thread.wait_until_ready(WAIT_S) is False
    assert loop.thread.state == "stopped"
    with pytest.raises(NotReadyError):
        loop.ask(PROMPTS[0])


def test_a_thread_that_never_started_can_be_stopped(text_engine, make_loop):
    loop = make_loop(start=False)
    assert isinstance(loop.thread, DeviceThread)
    loop.thread.stop()
    assert loop.thread.state == "stopped"
