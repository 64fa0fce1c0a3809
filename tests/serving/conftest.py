"""A small random pair with a tokenizer, and device threads over it."""

import threading

import pytest

from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.requests import check_request
from serving.engine_loop import DeviceThread
from serving.jobs import Failed, Finished, Job, LoopSettings, Tokens
from tests.engine.conftest import small_engine, text_engine  # noqa: F401
from tests.serving.harness import Records

WAIT_S = 120  # for what must come; a test that waits so long has failed


class Listener:
    """Collects the events of one job."""

    def __init__(self):
        self.events = []
        self.ended = threading.Event()
        self.first = threading.Event()

    def __call__(self, event):
        assert not self.ended.is_set(), "an event after the end"
        self.events.append(event)
        self.first.set()
        if not isinstance(event, Tokens):
            self.ended.set()

    def wait(self):
        assert self.ended.wait(WAIT_S)
        return self.events[-1]

    @property
    def token_ids(self):
        return [token for event in self.events if isinstance(event, Tokens) for token in event.token_ids]

    def finished(self) -> Finished:
        end = self.wait()
        assert isinstance(end, Finished), end
        return end

    def error(self) -> Exception:
        end = self.wait()
        assert isinstance(end, Failed), end
        return end.error


class Loop:
    """A device thread under test: `ask` puts a job in and returns its listener."""

    def __init__(self, engine, **settings):
        defaults = dict(
            algorithm=SpeculativeAlgorithm.DDTREE,
            budget=4,
            max_running_requests=4,
            max_queued_requests=64,
            context_length=160,
            chunked_prefill_size=32,
        )
        self.engine, self.settings = engine, LoopSettings(**(defaults | settings))
        self.records = Records()
        self.thread = DeviceThread(engine, self.settings, self.records)
        self._count = 0

    def request(self, prompt, max_new_tokens=20, **options):
        sampling = dict(temperature=0.0, top_k=None, top_p=None, min_p=None, seed=0, stop_token_ids=None, grammar=None)
        return check_request(
            self.engine,
            prompt,
            max_new_tokens,
            self.settings.algorithm,
            self.settings.budget,
            **(sampling | options),
        )

    def ask(self, prompt, *, request_id=None, stop_strings=(), deadline=None, listener=None, **options):
        listener = listener or Listener()
        self._count += 1
        self.thread.submit(
            Job(
                request_id=request_id or f"job-{self._count}",
                request=self.request(prompt, **options),
                on_event=listener,
                stop_strings=stop_strings,
                deadline=deadline,
            )
        )
        return listener


@pytest.fixture
def make_loop(text_engine):  # noqa: F811
    """Makes loops that are stopped at the end of the test; ready unless `start=False`."""
    loops = []

    def make(engine=text_engine, *, start=True, **settings):
        loop = Loop(engine, **settings)
        loops.append(loop)
        if start:
            loop.thread.start()
            assert loop.thread.wait_until_ready(WAIT_S)
        return loop

    yield make
    for loop in loops:
        loop.thread.stop()


@pytest.fixture(scope="module")
def shared_loop(text_engine):  # noqa: F811
    """One loop for the tests of a module that leave it as they found it."""
    loop = Loop(text_engine)
    loop.thread.start()
    assert loop.thread.wait_until_ready(WAIT_S)
    yield loop
    loop.thread.stop()
