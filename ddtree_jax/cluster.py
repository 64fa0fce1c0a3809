"""Several hosts as one: joining them through `jax.distributed`, and meshes written as text."""

from __future__ import annotations

import os
import re
import socket
import sys
import time

import jax

COORDINATOR = re.compile(r"[^\s:/]+:[0-9]{1,5}|\[[0-9a-fA-F:.]+\]:[0-9]{1,5}")
JOIN_SECONDS = 300


def parse_mesh(text: str) -> tuple[int, int]:
    """(expert, tensor) from "2x4", or "8" for 1x8; ValueError for anything else."""
    found = re.fullmatch(r"(?:([0-9]{1,6})x)?([0-9]{1,6})", text)
    sizes = None if found is None else (int(found[1] or 1), int(found[2]))
    if sizes is None or min(sizes) < 1:
        raise ValueError(f"mesh: got {text!r}, allowed is EXPERTxTENSOR such as 2x4, both >= 1, or TENSOR alone")
    return sizes


def _own_stdout(prints: bool) -> None:
    """Gives `sys.stdout` a descriptor of its own, or nothing to write to: collectives on the CPU (Gloo) write remarks
    to descriptor 1, which then leads nowhere.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if prints:
        sys.stdout.flush()
        sys.stdout = open(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(nowhere, 1)
    os.close(nowhere)


def join_cluster(coordinator: str | None, num_processes: int | None, process_id: int | None) -> bool:
    """Makes this process one of several that share a mesh, before any device is touched; True if it is one.

    Every process runs the same program with the same arguments but its own `process_id`. From here on `sys.stdout` of
    process 0 alone leads anywhere.

    Args:
      coordinator: "host:port" of process 0, reachable from all; None: this process is alone.
      num_processes: how many there are, >= 1.
      process_id: which one this is, 0..num_processes - 1.

    Raises:
      ValueError: one of the three without the others, or out of range; a port that process 0 cannot have; no process 0
        within five minutes. If process 0 waits as long for another one, JAX ends it with a message of its own.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return False
    if missing:
        raise ValueError(f"{missing[0]}: got nothing, allowed are coordinator, num_processes and process_id together")
    if not COORDINATOR.fullmatch(coordinator) or not 0 < int(coordinator.rsplit(":", 1)[1]) < 65536:
        raise ValueError(f"coordinator: got {coordinator!r}, allowed is HOST:PORT of process 0")
    if num_processes < 1:
        raise ValueError(f"num_processes: got {num_processes}, allowed is an integer >= 1")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id: got {process_id}, allowed are 0 to {num_processes - 1} (num_processes - 1)")
    _check_coordinator(coordinator, process_id)
    _own_stdout(prints=process_id == 0)
    jax.distributed.initialize(
        coordinator, num_processes, process_id, initialization_timeout=JOIN_SECONDS, local_device_ids=None
    )
    return num_processes > 1


def _check_coordinator(coordinator: str, process_id: int) -> None:
    """ValueError where JAX would end the process, some minutes later, by a signal and with a stack trace."""
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"coordinator: got {coordinator!r}, whose host is not known ({error})") from None
    if process_id == 0:
        try:
            with socket.socket() as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                own.bind(("", int(port)))
        except OSError as error:
            raise ValueError(
                f"coordinator: got {coordinator!r}, port {port} of this host cannot be used ({error.strerror}); "
                "give all processes another one"
            ) from None
        return
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"coordinator: got {coordinator!r}, where no process 0 answered within {JOIN_SECONDS} s ({error})"
                ) from None
            time.sleep(0.2)
