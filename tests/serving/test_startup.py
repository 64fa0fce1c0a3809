"""What is checked before a start, on the shipped pair and without reading its weights."""

import json
import shutil
import socket

import jax
import pytest

import ddtree_jax.algorithm
from ddtree_jax import CheckpointError, UnsupportedRequestError, capacity
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.engine import OpenedPair, demo_folder
from serving import startup
from serving.config import ServerConfig
from serving.jobs import LoopSettings
from serving.startup import check_start
from tests.serving.tls_files import PEMS, certificate


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    monkeypatch.setattr(OpenedPair, "read", lambda *_: pytest.fail("the weights were read"))


def configured(**changes) -> ServerConfig:
    return ServerConfig(**{"port": 0, **changes})


@pytest.fixture
def taken_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()
        yield own.getsockname()[1]


def test_the_defaults_are_the_settings_of_the_loop():
    plan = check_start(configured())
    assert plan.settings == LoopSettings(
        algorithm=SpeculativeAlgorithm.DDTREE,
        budget=startup.DEFAULT_BUDGET_ON_CPU if jax.default_backend() == "cpu" else startup.DEFAULT_BUDGET,
        max_running_requests=8,
        max_queued_requests=256,
        context_length=4096,
        chunked_prefill_size=256,
        prefix_reuse=True,
    )
    report = plan.report()
    assert "DDTREE, budget" in report and "drafter cache, 8 x" in report and "plaintext; no metrics" in report


def test_every_flag_of_the_loop_reaches_it():
    changes = {"speculative_algorithm": "dflash", "max_running_requests": 3, "max_queued_requests": 5}
    more = {"context_length": 100, "chunked_prefill_size": 64, "disable_radix_cache": True}
    more["constrained_json_disable_any_whitespace"] = True
    assert check_start(configured(**changes, **more)).settings == LoopSettings(
        algorithm=SpeculativeAlgorithm.DFLASH,
        budget=0,
        max_running_requests=3,
        max_queued_requests=5,
        context_length=100,
        chunked_prefill_size=64,
        prefix_reuse=False,
        compact_json=True,
    )
    assert check_start(configured(speculative_ddtree_budget=0)).settings.budget == 0


def test_a_budget_for_devices_that_are_no_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    settings, _ = startup.loop_settings(configured(dtype="float32"), startup._open(configured(dtype="float32")))
    assert settings.budget == startup.DEFAULT_BUDGET


def test_none_leaves_the_drafter_of_the_shipped_pair_out():
    plan = check_start(configured(speculative_algorithm="none", served_model_name="name"))
    assert plan.pair.drafter is None and "drafter" not in plan.report() and "model: name" in plan.report()


def test_the_block_size_of_the_drafter_is_the_only_number_of_draft_tokens():
    assert check_start(configured(speculative_num_draft_tokens=16)).settings.budget > 0
    with pytest.raises(ValueError, match="draft-tokens: got 15, allowed is the drafter's block size, 16"):
        check_start(configured(speculative_num_draft_tokens=15))


def test_more_context_than_positions():
    with pytest.raises(ValueError, match="context-length: got 4097, allowed are at most the model's 4096 positions"):
        check_start(configured(context_length=4097))


def test_folders_that_are_missing_or_no_pair(tmp_path):
    with pytest.raises(CheckpointError, match="absent: no such folder"):
        check_start(configured(model_path=str(tmp_path / "absent")))
    drafter = tmp_path / "drafter"
    shutil.copytree(demo_folder() / "drafter", drafter)
    text = json.loads((drafter / "config.json").read_text())
    text["hidden_size"] = 512
    (drafter / "config.json").write_text(json.dumps(text))
    with pytest.raises(CheckpointError):
        check_start(configured(speculative_draft_model_path=str(drafter)))


def test_a_flag_for_recurrent_layers_that_are_not_there():
    with pytest.raises(ValueError, match="allow_hybrid_unsafe: got True, but demo has no recurrent layers"):
        check_start(configured(speculative_ddtree_allow_hybrid_unsafe=True))


@pytest.fixture
def hybrid(monkeypatch):
    """As if the shipped target had recurrent layers that run in slot order."""
    monkeypatch.setattr(ddtree_jax.engine.Engine, "slot_order_layers", property(lambda engine: (2, 5)))


def test_a_branching_tree_on_a_hybrid_target_names_the_flag(hybrid):
    with pytest.raises(UnsupportedRequestError, match="layers 2, 5.*--speculative-ddtree-allow-hybrid-unsafe"):
        check_start(configured())
    assert not check_start(configured(speculative_algorithm="DFLASH")).remarks
    assert not check_start(configured(speculative_ddtree_budget=1)).remarks
    plan = check_start(configured(speculative_ddtree_allow_hybrid_unsafe=True))
    assert "recurrent layers 2, 5" in plan.report() and plan.pair.allow_hybrid_unsafe


def test_an_algorithm_without_ragged_batches_serves_one_request_at_a_time(monkeypatch):
    rows = ddtree_jax.algorithm.CAPABILITIES
    member = SpeculativeAlgorithm.DFLASH
    monkeypatch.setitem(rows, member, startup.dataclasses.replace(rows[member], ragged_batch=False))
    with pytest.raises(UnsupportedRequestError, match="DFLASH does not support a batch of different lengths"):
        check_start(configured(speculative_algorithm="DFLASH"))
    check_start(configured(speculative_algorithm="DFLASH", max_running_requests=1))


def test_memory_for_the_caches_and_for_the_weights(monkeypatch):
    monkeypatch.setattr(capacity, "host_memory_free", lambda: 200_000_000)
    with pytest.raises(CheckpointError, match="caches for 8 requests of 4096 tokens.*smaller max-running-requests"):
        check_start(configured())
    check_start(configured(max_running_requests=1))
    monkeypatch.setattr(capacity, "host_memory_free", lambda: 1_000_000)
    with pytest.raises(CheckpointError, match="smaller or quantised checkpoint"):
        check_start(configured())


def test_a_mesh_of_more_devices_than_there_are():
    with pytest.raises(ValueError, match="mesh: got 64 x 64"):
        check_start(configured(mesh="64x64"))


def test_ports_that_are_taken(taken_port):
    with pytest.raises(ValueError, match=f"^port: got {taken_port}, which cannot be used at 127.0.0.1"):
        check_start(configured(port=taken_port))
    with pytest.raises(ValueError, match=f"^metrics-port: got {taken_port}, which cannot be used"):
        check_start(configured(metrics_port=taken_port))
    assert "metrics at port 0" in check_start(configured(metrics_port=0)).report()


def test_a_host_that_is_not_here():
    with pytest.raises(ValueError, match="host: got 'no such host', which is not known"):
        check_start(configured(host="no such host"))
    with pytest.raises(ValueError, match="port: got 0, which cannot be used at 192.0.2.1"):
        check_start(configured(host="192.0.2.1"))  # an address for documentation


def test_tls_files_that_belong_together(tmp_path):
    server, client = certificate(tmp_path, "server"), certificate(tmp_path, "client")
    files = {"ssl_certfile": server.certificate_file, "ssl_keyfile": server.key_file}
    assert "TLS" in check_start(configured(**files, ssl_ca_certs=client.certificate_file)).report()
    locked, junk = tmp_path / "locked.key", tmp_path / "junk"
    locked.write_bytes(PEMS["locked.key"])
    junk.write_bytes(b"junk \xff")
    wrong = [
        ({"ssl_keyfile": client.key_file}, "ssl-certfile, ssl-keyfile: got .*MISMATCH"),
        ({"ssl_keyfile": str(locked)}, "the key has a password"),
        ({"ssl_keyfile": str(junk)}, "ssl-certfile, ssl-keyfile: got"),
        ({"ssl_certfile": str(junk)}, "ssl-certfile, ssl-keyfile: got"),
        ({"ssl_certfile": str(tmp_path / "absent")}, "ssl-certfile: got .*absent', which cannot be read .No such file"),
        ({"ssl_keyfile": str(tmp_path)}, "ssl-keyfile: got .*, which cannot be read .Is a directory"),
        ({"ssl_ca_certs": str(junk)}, "ssl-ca-certs: got .*junk"),
        ({"ssl_ca_certs": server.key_file}, "ssl-ca-certs: got .*server.key"),
    ]
    for changes, named in wrong:
        with pytest.raises(ValueError, match=named):
            check_start(configured(**{**files, **changes}))


def test_a_folder_for_programs(tmp_path):
    check_start(configured(compilation_cache_dir=str(tmp_path / "new" / "deeper")))
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(ValueError, match="compilation-cache-dir: got"):
            check_start(configured(compilation_cache_dir=str(path)))
