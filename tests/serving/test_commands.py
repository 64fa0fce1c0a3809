"""`ddtree-jax serve` and `ddtree-jax client`: what reaches the server, what is printed, and the exit status."""

import importlib
import json
import runpy
import sys
import types

import grpc
import jax
import pytest

import serving
from ddtree_jax import cli
from ddtree_jax.engine import OpenedPair
from serving.config import ServerConfig
from serving.jobs import LoopSettings
from serving.tls import TlsFiles
from tests.serving.fake_server import SECONDS, STATISTICS, FakeServer, demo_tokenizer, running
from tests.serving.tls_files import certificate

pytestmark = pytest.mark.timeout(60)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def one_line(err: str) -> str:
    assert err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err, err
    return err


@pytest.fixture
def fake():
    return FakeServer(chunks=[[i] for i in demo_tokenizer().encode("one two")])


@pytest.fixture
def ask(fake, capsys):
    with running(fake) as address:
        yield lambda *argv: run(capsys, "client", *argv, "--server", address)


def test_a_dry_run_reports_and_reads_no_weights(capsys, monkeypatch):
    monkeypatch.setattr(OpenedPair, "read", lambda *_: pytest.fail("the weights were read"))
    status, out, err = run(capsys, "serve", "--dry-run", "--port", "0")
    assert (status, err) == (0, "") and "algorithm: DDTREE" in out and "fits" in out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--port", "x"), "argument --port: got 'x'"),
        (("--context-length", "9999"), "context-length: got 9999"),
        (("--model-path", "/no/such/folder"), "/no/such/folder: no such folder"),
        (("--model-path", "/t", "--speculative-algorithm", "DDTREE"), "needs a drafter"),
        (("--config", "/no/such/file"), "/no/such/file cannot be read"),
        (("--ssl-keyfile", "/k"), "ssl-keyfile"),
    ],
)
@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_a_start_that_cannot_work_is_one_line(capsys, argv, named, dry):
    status, out, err = run(capsys, "serve", *dry, *argv)
    assert (status, out) == (2, "") and named in one_line(err)


@pytest.mark.parametrize("command", [("serve", "--dry-run"), ("client", "p")])
def test_without_the_extra_the_line_names_it(capsys, monkeypatch, command):
    real = importlib.import_module

    def missing(name, *rest):
        if name == "grpc_health":
            raise ImportError("No module named 'grpc_health'")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    status, _, err = run(capsys, *command)
    assert status == 2 and "grpc_health" in one_line(err) and "ddtree-jax[serving]" in err


def test_python_m_serving_is_serve(monkeypatch):
    calls = []
    monkeypatch.setattr(cli, "main", lambda argv: calls.append(argv) or 7)
    monkeypatch.setattr(sys, "argv", ["serving", "--dry-run"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("serving", run_name="__main__")
    assert caught.value.code == 7 and calls == [["serve", "--dry-run"]]


def test_a_server_is_started_with_what_was_asked(capsys, monkeypatch, tmp_path):
    """The joins in `serving.launch`, with stand-ins for what is joined."""
    seen = {}

    class Thread:
        def __init__(self, engine, settings, observer, progress):
            seen.update(engine=engine, settings=settings, observer=observer)
            progress("compiling")

        def start(self):
            seen["started"] = True

        def wait_until_ready(self):
            return True

        def stop(self):
            seen["stopped"] = True

        def watch(self, callback):
            raise AssertionError("for the server to ask for")

    async def serve(factory, options, *, on_start):
        on_start(types.SimpleNamespace(port=123, is_loading=False))
        seen.update(options=options, backend=factory())
        seen["backend"].loop.stop()
        return 0

    stand_ins = {
        "server": types.SimpleNamespace(ListenOptions=types.SimpleNamespace, serve=serve),
        "servicer": types.SimpleNamespace(Backend=types.SimpleNamespace),
        "engine_loop": types.SimpleNamespace(DeviceThread=Thread),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"serving.{name}", module)
        monkeypatch.setattr(serving, name, module, raising=False)
    monkeypatch.setattr(OpenedPair, "read", lambda self, progress, *, capacity: progress("loading") or "engine")
    updates = []
    monkeypatch.setattr(jax.config, "update", lambda *one: updates.append(one))
    pem, programs = certificate(tmp_path, "server"), str(tmp_path / "programs")
    options = ("--port", "0", "--grace-period", "2", "--max-running-requests", "3", "--metrics-port", "0")
    options += ("--ssl-certfile", pem.certificate_file, "--ssl-keyfile", pem.key_file)
    options += ("--compilation-cache-dir", programs, "--served-model-name", "name")
    status, out, err = run(capsys, "serve", *options)
    assert status == 0 and out == "ddtree-jax: name (DDTREE budget 8) at 127.0.0.1:123, loading\n"
    assert (seen["engine"], seen["started"], seen["stopped"]) == ("engine", True, True)
    assert isinstance(seen["settings"], LoopSettings) and seen["settings"].max_running_requests == 3
    assert seen["observer"].metrics is not None and seen["backend"].observer is seen["observer"]
    assert (seen["options"].host, seen["options"].shutdown_grace_s) == ("127.0.0.1", 2.0)
    assert seen["options"].served_model_name == "name"
    assert seen["options"].tls == TlsFiles(pem.certificate_file, pem.key_file)
    assert seen["backend"].loop.watch.__func__ is Thread.watch
    assert ("jax_compilation_cache_dir", programs) in updates
    messages = [json.loads(line)["message"] for line in err.splitlines()]
    assert messages[0].startswith("metrics at 127.0.0.1 port ") and messages[1:] == ["loading", "compiling"]


def test_the_client_streams_the_text_and_ends_with_the_statistics(ask):
    status, out, err = ask("a prompt")
    assert (status, err) == (0, "")
    text, line = out.splitlines()
    assert text == "one two" and line.startswith("[server, budget 8]") and "acceptance length 2.50" in line


def test_every_option_of_the_client_reaches_the_server(fake, ask, tmp_path):
    schema = tmp_path / "schema"
    schema.write_text('{"type": "integer"}')
    status, _, _ = ask(
        *("1 2", "--token-ids", "--max-new-tokens", "5", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.5"),
        *("--min-p", "0.25", "--seed", "7", "--stop-token-ids", "4,5", "--stop", "x", "--stop", "y"),
        *("--json-schema", str(schema), "--request-id", "mine", "--timeout", "50"),
    )
    (request,) = fake.requests
    params = request.sampling_params
    assert status == 0 and list(request.tokenized.input_ids) == [1, 2] and request.request_id == "mine"
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0.5, 3, 0.5)
    assert (params.min_p, params.seed, list(params.stop_token_ids), list(params.stop)) == (0.25, 7, [4, 5], ["x", "y"])
    assert params.json_schema == '{"type": "integer"}'


def test_json_is_one_object(ask):
    status, out, _ = ask("p", "--json")
    document = json.loads(out)
    assert status == 0 and document["text"] == "one two" and document["statistics"] == STATISTICS
    assert document["finish_reason"] == "length" and document["token_ids"] == demo_tokenizer().encode("one two")


def test_a_server_without_a_tokenizer_gives_ids(fake, ask):
    fake.archive, fake.chunks = None, [[5, 6], [7]]
    status, out, _ = ask("1", "--token-ids")
    assert status == 0 and out.splitlines()[0] == "5 6 7"
    assert json.loads(ask("1", "--token-ids", "--json")[1])["text"] is None


def test_an_output_that_could_not_go_on_is_status_2_after_its_text(fake, ask):
    fake.end = {"finish_reason": "error"}
    status, out, err = ask("p")
    assert status == 2 and out.startswith("one two\n") and "the server ended it: error" in one_line(err)


@pytest.mark.parametrize(
    ("code", "status"),
    [("INVALID_ARGUMENT", 2), ("RESOURCE_EXHAUSTED", 2), ("UNAVAILABLE", 2), ("DEADLINE_EXCEEDED", 2), ("INTERNAL", 1)],
)
def test_what_the_server_says_is_one_line_with_a_status(fake, ask, code, status):
    fake.failure = (grpc.StatusCode[code], "what was\n\x1b[31m wrong")
    got, _, err = ask("p")
    assert got == status and f"{code}: what was" in one_line(err) and "\x1b" not in err


def test_a_server_that_is_not_there_is_one_line(capsys):
    status, out, err = run(capsys, "client", "p", "--server", "127.0.0.1:1")
    assert (status, out) == (2, "") and "127.0.0.1:1: UNAVAILABLE" in one_line(err)


def test_a_server_without_a_name_is_one_line(capfd):
    status, out, err = run(capfd, "client", "p", "--server", "")
    assert (status, out) == (2, "") and "--server: got an empty text" in one_line(err)


def test_an_interrupt_cancels_on_the_server(fake, ask, monkeypatch):
    fake.hold = True
    write = sys.stdout.write

    def interrupted(text):
        if text == "one":
            raise KeyboardInterrupt
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", interrupted)
    assert ask("p") == (130, "", "")
    assert fake.cancelled.wait(SECONDS)


def test_the_client_over_tls(fake, capsys, tmp_path):
    server = certificate(tmp_path, "server")
    credentials = grpc.ssl_server_credentials([(server.key, server.certificates)])
    with running(fake, lambda s: s.add_secure_port("127.0.0.1:0", credentials)) as address:
        options = ("client", "p", "--server", address, "--ssl-ca-certs", server.certificate_file)
        assert run(capsys, *options)[0] == 0
        assert run(capsys, *options[:4])[0] == 2


def test_the_port_of_the_client_is_that_of_the_server():
    from ddtree_jax.cli_serve import DEFAULT_SERVER

    assert f"{ServerConfig().host}:{ServerConfig().port}" == DEFAULT_SERVER
