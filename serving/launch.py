"""Starts the server: checks, logs, metrics, and then the RPCs in front of the device thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

import jax

from ddtree_jax.algorithm import capabilities
from serving.config import ServerConfig
from serving.logs import LOGGER, logging_to
from serving.metrics import Metrics, MetricsServer, Telemetry
from serving.startup import Plan, check_start

Progress = Callable[[str], None]


def serve(config: ServerConfig, progress: Progress | None) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit status. Call it in the main thread. If the model still loads
    when the grace period is over, the process ends here.

    progress: called with a line of text now and then while the model loads and compiles; None: the log has them.

    Raises ValueError, CheckpointError or UnsupportedRequestError before anything is served, as
    `serving.startup.check_start`.
    """
    plan = check_start(config)
    from serving import server

    if config.compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", config.compilation_cache_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(logging_to(level=config.log_level, requests=config.log_requests))
        log = logging.getLogger(LOGGER)
        for remark in plan.remarks:
            log.warning(remark)
        metrics = None
        if config.metrics_port is not None:
            metrics = Metrics()
            metrics_server = MetricsServer(metrics, config.host, config.metrics_port)
            stack.callback(metrics_server.close)
            log.info("metrics at %s port %d", config.host, metrics_server.port)
        telemetry = Telemetry(metrics)
        report = log.info if progress is None else progress
        options = server.ListenOptions(
            host=config.host,
            port=config.port,
            tls=config.tls,
            shutdown_grace_s=config.grace_period,
            served_model_name=config.model_name,
        )
        started: list[server.Server] = []

        def on_start(running: server.Server) -> None:
            started.append(running)
            print(_banner(plan, running.port), flush=True)

        status = asyncio.run(server.serve(lambda: _start(plan, telemetry, report), options, on_start=on_start))
    if started[0].is_loading:
        # Python's own end would take the interpreter from the compiler, which then crashes the process.
        os._exit(status)
    return status


def _start(plan: Plan, telemetry: Telemetry, report: Progress) -> object:
    """Reads the weights and returns once the device thread takes requests."""
    from serving.engine_loop import DeviceThread
    from serving.servicer import Backend

    engine = plan.pair.read(report, capacity=plan.capacity)
    thread = DeviceThread(engine, plan.settings, telemetry, report)
    thread.start()
    if not thread.wait_until_ready():
        thread.stop()
        raise RuntimeError("the device thread ended before it was ready")
    return Backend(engine=engine, settings=plan.settings, loop=thread, observer=telemetry)


def _banner(plan: Plan, port: int) -> str:
    settings = plan.settings
    budget = f" budget {settings.budget}" if capabilities(settings.algorithm).branching else ""
    host = f"[{plan.config.host}]" if ":" in plan.config.host else plan.config.host
    return f"ddtree-jax: {plan.config.model_name} ({settings.algorithm.name}{budget}) at {host}:{port}, loading"
