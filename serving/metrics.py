"""What the device thread reports, as Prometheus metrics over HTTP and as log lines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, ProcessCollector

from serving.jobs import STATES, Load, RequestRecord, RoundRecord
from serving.logs import LOGGER, log_request

PREFIX = "ddtree"
# Edges of histograms. Acceptance: every length of a block of 16 or 32; trees: a root and a usual budget.
LENGTHS = (*range(1, 17), 24, 32)
TREE_SIZES = (1, 2, 5, 9, 17, 33, 65, 129, 257, 513, 1025)
ROUND_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
WAIT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """The metrics, in a registry of their own. Every method takes microseconds a value."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def make(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            return kind(f"{PREFIX}_{name}", text, labels, registry=self.registry, **more)

        self._requests = make(
            Counter, "requests", "Finished requests, by finish reason or failed status.", ("outcome",)
        )
        self._prompt_tokens = make(Counter, "prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = make(
            Counter, "cached_prompt_tokens", "Prompt tokens of finished requests that an earlier prompt had computed."
        )
        self._generated_tokens = make(Counter, "generated_tokens", "Output tokens of finished requests.")
        self._queue_seconds = make(Histogram, "queue_seconds", "Wait for a slot.", buckets=WAIT_SECONDS)
        self._first_token = make(
            Histogram, "time_to_first_token_seconds", "From arrival to the first token.", buckets=WAIT_SECONDS
        )
        self._request_seconds = make(Histogram, "request_seconds", "From arrival to the end.", buckets=WAIT_SECONDS)

        self._rounds = make(Counter, "rounds", "Rounds of all running requests together.", ("algorithm",))
        self._round_tokens = make(Counter, "round_tokens", "Tokens that rounds emitted.", ("algorithm",))
        self._round_rows = make(
            Counter, "round_rows", "Rows of rounds, those of sequences and those of padding.", ("kind",)
        )
        self._acceptance = make(
            Histogram,
            "acceptance_length",
            "Tokens that a round emitted for one sequence, its bonus token included.",
            ("algorithm",),
            buckets=LENGTHS,
        )
        self._tree_size = make(
            Histogram,
            "tree_size",
            "Nodes of one sequence's tree, the root included.",
            ("algorithm",),
            buckets=TREE_SIZES,
        )
        self._round_seconds = make(
            Histogram,
            "round_seconds",
            "Time of a round by stage; stages other than round are sampled.",
            ("stage",),
            buckets=ROUND_SECONDS,
        )
        self._inter_token = make(
            Histogram,
            "inter_token_seconds",
            "Time since a sequence's last tokens over the tokens that came, once a round and sequence.",
            buckets=ROUND_SECONDS,
        )
        self._prefill_seconds = make(
            Histogram,
            "prefill_seconds",
            "Time of a prefill chunk; only the last of a prompt waits for the device.",
            buckets=WAIT_SECONDS,
        )
        self._prefill_tokens = make(Counter, "prefill_tokens", "Prompt tokens that prefill computed.")

        self._state = make(Enum, "state", "State of the server.", states=list(STATES))
        self._gauges = {
            "running": make(Gauge, "slots_in_use", "Requests that are decoded or prefilled."),
            "max_running_requests": make(Gauge, "slots", "Requests that can be decoded together."),
            "waiting": make(Gauge, "queue_depth", "Requests that wait for a slot."),
            "waiting_tokens": make(Gauge, "queue_prompt_tokens", "Prompt tokens of the requests that wait."),
            "used_tokens": make(Gauge, "cache_tokens_in_use", "Tokens in the caches of running requests."),
            "max_tokens": make(Gauge, "cache_tokens", "Tokens that the caches of all slots can hold."),
            "tokens_per_second": make(Gauge, "tokens_per_second", "Output tokens a second, of the last seconds."),
            "cache_hit_rate": make(Gauge, "prefix_cache_hit_rate", "Part of all prompt tokens that was reused."),
        }

    def request_finished(self, record: RequestRecord) -> None:
        self._requests.labels(record.outcome).inc()
        self._prompt_tokens.inc(record.num_prompt_tokens)
        self._cached_tokens.inc(record.num_cached_tokens)
        self._generated_tokens.inc(record.num_output_tokens)
        self._queue_seconds.observe(record.queue_s)
        self._request_seconds.observe(record.total_s)
        if record.time_to_first_token_s is not None:
            self._first_token.observe(record.time_to_first_token_s)

    def round_finished(self, record: RoundRecord) -> None:
        algorithm = record.algorithm.value
        self._rounds.labels(algorithm).inc()
        self._round_tokens.labels(algorithm).inc(record.num_tokens)
        num_real = len(record.acceptance_lengths)
        self._round_rows.labels("sequence").inc(num_real)
        self._round_rows.labels("padding").inc(max(record.width - num_real, 0))
        for histogram, values in ((self._acceptance, record.acceptance_lengths), (self._tree_size, record.tree_sizes)):
            one = histogram.labels(algorithm)
            for value in values:
                one.observe(value)
        for stage, seconds in record.stage_s.items():
            self._round_seconds.labels(stage).observe(seconds)
        for seconds in record.inter_token_s:
            self._inter_token.observe(seconds)

    def prefill_finished(self, num_tokens: int, seconds: float) -> None:
        self._prefill_tokens.inc(num_tokens)
        self._prefill_seconds.observe(seconds)

    def load_changed(self, load: Load) -> None:
        self._state.state(load.state)
        for name, gauge in self._gauges.items():
            gauge.set(getattr(load, name))

    def text(self) -> str:
        """All metrics in the text format of Prometheus."""
        return prometheus_client.generate_latest(self.registry).decode("utf-8")


class Telemetry:
    """The observer that the device thread gets: log lines, and metrics where there are any. Its methods never raise."""

    def __init__(self, metrics: Metrics | None) -> None:
        self.metrics = metrics

    def request_finished(self, record: RequestRecord) -> None:
        self._try(log_request, record)
        if self.metrics is not None:
            self._try(self.metrics.request_finished, record)

    def round_finished(self, record: RoundRecord) -> None:
        if self.metrics is not None:
            self._try(self.metrics.round_finished, record)

    def prefill_finished(self, num_tokens: int, seconds: float) -> None:
        if self.metrics is not None:
            self._try(self.metrics.prefill_finished, num_tokens, seconds)

    def load_changed(self, load: Load) -> None:
        if self.metrics is not None:
            self._try(self.metrics.load_changed, load)

    def _try(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception:
            logging.getLogger(LOGGER).exception("a metric or log line was lost")


class MetricsServer:
    """Serves metrics at http://HOST:PORT/metrics until `close`. Raises ValueError where the port cannot be had.

    port: the bound one, also where 0 was asked for.
    """

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, metrics.registry)
        except OSError as error:
            raise ValueError(
                f"metrics-port: got {port}, which cannot be used at {host} ({error.strerror or error}); "
                "give another one"
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
