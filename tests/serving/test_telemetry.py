"""Metrics and logs: what the device thread reports arrives, and nothing that goes wrong comes back to it."""

import dataclasses
import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.cli_engine import progress_writer
from serving import logs
from serving.jobs import STATES, Load, RequestRecord, RoundRecord
from serving.logs import LOGGER, log_request, logging_to
from serving.metrics import Metrics, MetricsServer, Telemetry

pytestmark = pytest.mark.timeout(60)
RECORD = RequestRecord(
    request_id="r1",
    outcome="stop",
    algorithm=SpeculativeAlgorithm.DDTREE,
    num_prompt_tokens=10,
    num_cached_tokens=4,
    num_output_tokens=7,
    queue_s=0.25,
    time_to_first_token_s=0.5,
    total_s=2.0,
    num_rounds=2,
    mean_acceptance_length=3.0,
    mean_tree_size=9.0,
    has_grammar=True,
)
REFUSED = dataclasses.replace(
    RECORD, request_id="r2", outcome="CANCELLED", num_output_tokens=0, time_to_first_token_s=None, error="gone\naway"
)
ROUND = RoundRecord(
    algorithm=SpeculativeAlgorithm.DDTREE,
    width=4,
    acceptance_lengths=(1, 5, 16),
    tree_sizes=(9, 9, 3),
    num_tokens=22,
    stage_s={"round": 0.01, "draft": 0.002},
    inter_token_s=(0.01, 0.002, 0.0006),
)
LOAD = Load(
    state="ready",
    running=3,
    waiting=2,
    waiting_tokens=50,
    used_tokens=100,
    max_tokens=1000,
    max_running_requests=8,
    tokens_per_second=12.5,
    cache_hit_rate=0.25,
)


def values(text: str) -> dict[str, float]:
    """Samples by name and labels, as Prometheus itself reads them."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_what_is_reported_is_counted():
    metrics = Metrics()
    telemetry = Telemetry(metrics)
    telemetry.request_finished(RECORD)
    telemetry.request_finished(REFUSED)
    telemetry.round_finished(ROUND)
    telemetry.prefill_finished(100, 0.03)
    telemetry.load_changed(LOAD)
    seen = values(metrics.text())
    expected = {
        "ddtree_requests_total{outcome=stop}": 1,
        "ddtree_requests_total{outcome=CANCELLED}": 1,
        "ddtree_prompt_tokens_total": 20,
        "ddtree_cached_prompt_tokens_total": 8,
        "ddtree_generated_tokens_total": 7,
        "ddtree_queue_seconds_count": 2,
        "ddtree_time_to_first_token_seconds_count": 1,
        "ddtree_time_to_first_token_seconds_sum": 0.5,
        "ddtree_request_seconds_sum": 4.0,
        "ddtree_rounds_total{algorithm=ddtree}": 1,
        "ddtree_round_tokens_total{algorithm=ddtree}": 22,
        "ddtree_round_rows_total{kind=sequence}": 3,
        "ddtree_round_rows_total{kind=padding}": 1,
        "ddtree_acceptance_length_count{algorithm=ddtree}": 3,
        "ddtree_acceptance_length_sum{algorithm=ddtree}": 22,
        "ddtree_acceptance_length_bucket{algorithm=ddtree,le=1.0}": 1,
        "ddtree_acceptance_length_bucket{algorithm=ddtree,le=5.0}": 2,
        "ddtree_acceptance_length_bucket{algorithm=ddtree,le=16.0}": 3,
        "ddtree_tree_size_bucket{algorithm=ddtree,le=5.0}": 1,
        "ddtree_tree_size_bucket{algorithm=ddtree,le=9.0}": 3,
        "ddtree_round_seconds_sum{stage=round}": 0.01,
        "ddtree_round_seconds_sum{stage=draft}": 0.002,
        "ddtree_inter_token_seconds_count": 3,
        "ddtree_prefill_tokens_total": 100,
        "ddtree_prefill_seconds_sum": 0.03,
        "ddtree_slots_in_use": 3,
        "ddtree_slots": 8,
        "ddtree_queue_depth": 2,
        "ddtree_queue_prompt_tokens": 50,
        "ddtree_cache_tokens_in_use": 100,
        "ddtree_cache_tokens": 1000,
        "ddtree_tokens_per_second": 12.5,
        "ddtree_prefix_cache_hit_rate": 0.25,
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert {state: seen[f"ddtree_state{{ddtree_state={state}}}"] for state in STATES} == {
        state: float(state == "ready") for state in STATES
    }


def test_two_servers_in_one_process_count_apart():
    first, second = Metrics(), Metrics()
    first.request_finished(RECORD)
    assert "ddtree_requests_total{outcome=stop}" not in values(second.text())


def test_the_port_answers_until_it_is_closed():
    metrics = Metrics()
    metrics.prefill_finished(5, 0.1)
    server = MetricsServer(metrics, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        assert values(text)["ddtree_prefill_tokens_total"] == 5
        with pytest.raises(ValueError, match=f"metrics-port: got {server.port}, which cannot be used at 127.0.0.1"):
            MetricsServer(metrics, "127.0.0.1", server.port)
    finally:
        server.close()
    with socket.socket() as own:
        assert own.connect_ex(("127.0.0.1", server.port)) != 0
    assert not any("serve_forever" in thread.name for thread in threading.enumerate())


class Broken:
    def fail(self, *arguments):
        raise RuntimeError("a metric is broken")

    request_finished = round_finished = prefill_finished = load_changed = fail


def test_what_goes_wrong_does_not_reach_the_device_thread():
    out = io.StringIO()
    with logging_to(out):
        telemetry = Telemetry(Broken())
        telemetry.request_finished(RECORD)
        telemetry.request_finished(dataclasses.replace(RECORD, algorithm=None))
        telemetry.round_finished(ROUND)
        telemetry.prefill_finished(1, 1.0)
        telemetry.load_changed(LOAD)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    # four broken metrics, twice for the one of a finished request, and a record that cannot be written
    assert [line["message"] for line in lines].count("a metric or log line was lost") == 6
    assert any("a metric is broken" in line.get("traceback", "") for line in lines)


def test_without_metrics_there_are_still_lines():
    out = io.StringIO()
    with logging_to(out):
        telemetry = Telemetry(None)
        telemetry.request_finished(RECORD)
        telemetry.round_finished(ROUND)
        telemetry.prefill_finished(1, 1.0)
        telemetry.load_changed(LOAD)
    assert len(out.getvalue().splitlines()) == 1


def test_a_finished_request_is_one_line():
    out = io.StringIO()
    with logging_to(out):
        log_request(RECORD)
        log_request(REFUSED)
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "serving.requests",
        "message": "request",
        "request_id": "r1",
        "outcome": "stop",
        "algorithm": "ddtree",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 7,
        "queue_s": 0.25,
        "time_to_first_token_s": 0.5,
        "total_s": 2.0,
        "rounds": 2,
        "mean_acceptance_length": 3.0,
        "mean_tree_size": 9.0,
        "grammar": True,
    }
    assert (second["level"], second["outcome"], second["error"]) == ("warning", "CANCELLED", "gone away")
    assert second["time_to_first_token_s"] is None


@pytest.mark.parametrize(("requests", "ids"), [("all", ["r1", "r2"]), ("failed", ["r2"]), ("none", [])])
@pytest.mark.parametrize("level", ["debug", "error"])
def test_request_lines_do_not_depend_on_the_level(requests, ids, level):
    out = io.StringIO()
    with logging_to(out, level=level, requests=requests):
        log_request(RECORD)
        log_request(REFUSED)
        logging.getLogger("serving.other").info("a message")
        logging.getLogger("ddtree_jax.other").error("a fault")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["request_id"] for line in lines if "request_id" in line] == ids
    assert [line["message"] for line in lines if "request_id" not in line] == (
        ["a message", "a fault"] if level == "debug" else ["a fault"]
    )


def test_a_line_stays_one_line_whatever_is_in_it():
    out = io.StringIO()
    with logging_to(out):
        logging.getLogger(LOGGER).info("two\nlines \x1b[31m ☃ %s", {"a": 1})
    (line,) = out.getvalue().splitlines()
    assert line.isprintable() and json.loads(line)["message"] == "two\nlines \x1b[31m ☃ {'a': 1}"


class Stuck(io.StringIO):
    """A stderr that nobody reads: the first write waits."""

    def __init__(self):
        super().__init__()
        self.reading, self.writing = threading.Event(), threading.Event()

    def write(self, text):
        self.writing.set()
        assert self.reading.wait(20)
        return super().write(text)


def test_a_reader_that_does_not_read_stops_nobody(monkeypatch):
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 5)
    out = Stuck()
    with logging_to(out):
        log_request(RECORD)
        assert out.writing.wait(20)
        for _ in range(20):
            log_request(RECORD)  # must return, though nothing is written
        out.reading.set()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == 1 + 5 + 1 and lines[-1]["message"] == "15 log lines were dropped: nobody read them"


def test_the_end_does_not_wait_for_a_reader_that_does_not_read(monkeypatch):
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 1)
    monkeypatch.setattr(logs, "LAST_LINES_S", 0.05)
    out = Stuck()
    with logging_to(out):
        for _ in range(3):
            log_request(RECORD)
        assert out.writing.wait(20)
    assert not out.reading.is_set() and not out.getvalue()
    out.reading.set()


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_stderr_that_is_gone_is_not_the_end():
    with logging_to(Gone()):
        log_request(RECORD)


def test_a_process_ends_whose_stderr_nobody_reads():
    script = (
        "import logging; from serving import logs; logs.LAST_LINES_S = 0.1\n"
        "with logs.logging_to():\n"
        "    logging.getLogger('serving').warning('x' * 2**20)\n"
        "print('over', flush=True)"
    )
    reader, writer = os.pipe()
    try:
        ended = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=writer, timeout=30)
    finally:
        os.close(reader)
        os.close(writer)
    assert (ended.returncode, ended.stdout) == (0, b"over\n")


def test_without_a_stderr_there_is_no_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert progress_writer(True) is None and progress_writer(False) is None


def test_the_loggers_are_left_as_they_were():
    loggers = [logging.getLogger(name) for name in (*logs.LOGGERS, logs.REQUESTS)]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    with logging_to(io.StringIO(), level="debug"):
        assert loggers[0].level == logging.DEBUG
    assert [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers] == before
