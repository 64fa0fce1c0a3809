"""The flags of the server: one table behind the command line and the file, and refusals of what would be ignored."""

import argparse
import dataclasses

import pytest

import ddtree_jax.algorithm
from ddtree_jax.algorithm import SpeculativeAlgorithm
from serving import config
from serving.config import OPTIONS, ServerConfig, add_server_options, config_from, read_config_file


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


def parse(*argv: str) -> ServerConfig:
    parser = Parser(allow_abbrev=False)
    add_server_options(parser)
    return config_from(parser.parse_args(argv))


def write(tmp_path, text: str | bytes) -> str:
    path = tmp_path / "server.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


# a value other than the default of every option, as text and as TOML, that goes with the defaults of the others
OTHER = {
    "model-path": ("demo-nvfp4", '"demo-nvfp4"'),
    "served-model-name": ("name", '"name"'),
    "dtype": ("bfloat16", '"bfloat16"'),
    "kernels": ("reference", '"reference"'),
    "mesh": ("1x2", '"1x2"'),
    "compilation-cache-dir": ("/x", '"/x"'),
    "speculative-algorithm": ("DFlash", '"DFlash"'),
    "speculative-draft-model-path": ("/d", '"/d"'),
    "speculative-num-draft-tokens": ("16", "16"),
    "speculative-ddtree-budget": ("9", "9"),
    "speculative-ddtree-allow-hybrid-unsafe": ("true", "true"),
    "max-running-requests": ("3", "3"),
    "max-queued-requests": ("0", "0"),
    "context-length": ("77", "77"),
    "chunked-prefill-size": ("64", "64"),
    "constrained-json-disable-any-whitespace": ("true", "true"),
    "disable-radix-cache": ("true", "true"),
    "host": ("::1", '"::1"'),
    "port": ("0", "0"),
    "grace-period": ("1.5", "1.5"),
    "metrics-port": ("9", "9"),
    "log-level": ("error", '"error"'),
    "log-requests": ("failed", '"failed"'),
}
TLS = ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs")


def test_every_option_is_in_this_test():
    assert {option.name for option in OPTIONS} == {*OTHER, *TLS}
    assert {option.field for option in OPTIONS} == {field.name for field in dataclasses.fields(ServerConfig)}


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.name in OTHER], ids=lambda option: option.name)
def test_the_command_line_and_the_file_give_the_same(tmp_path, option):
    text, toml = OTHER[option.name]
    from_line = parse(f"--{option.name}", text)
    assert getattr(from_line, option.field) != option.default
    assert parse("--config", write(tmp_path, f"{option.name} = {toml}")) == from_line
    assert dataclasses.replace(from_line, **{option.field: option.default}) == ServerConfig()


def test_the_tls_files_are_read(tmp_path):
    line = [part for name in TLS for part in (f"--{name}", f"/{name}")]
    toml = "\n".join(f'{name} = "/{name}"' for name in TLS)
    made = parse(*line)
    assert made == parse("--config", write(tmp_path, toml)) and made.ssl_ca_certs == "/ssl-ca-certs"


def test_the_command_line_wins_over_the_file(tmp_path):
    path = write(tmp_path, "port = 1\nmax-running-requests = 2\ndisable-radix-cache = true\ngrace-period = 3\n")
    made = parse("--port", "7", "--config", path, "--disable-radix-cache=false")
    assert (made.port, made.max_running_requests, made.disable_radix_cache, made.grace_period) == (7, 2, False, 3)


def test_the_names_of_the_other_commands_work():
    assert parse("--target", "/t", "--drafter", "/d") == ServerConfig(
        model_path="/t", speculative_draft_model_path="/d"
    )
    with pytest.raises(ValueError, match="given twice"):
        parse("--target", "/t", "--model-path", "/t")


def test_a_flag_without_a_value_is_on():
    assert parse("--disable-radix-cache").disable_radix_cache and not parse().disable_radix_cache


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--port", "x"), "argument --port: got 'x', allowed is an integer in [0, 65535]"),
        (("--port", "65536"), "argument --port: got 65536"),
        (("--port", "1.0"), "argument --port: got '1.0'"),
        (("--max-running-requests", "0"), "got 0, allowed is an integer in [1, 256]"),
        (("--max-queued-requests", "-1"), "got -1"),
        (("--context-length", "1"), "got 1, allowed is an integer >= 2"),
        (("--chunked-prefill-size", "96"), "chunked-prefill-size: got 96, allowed are powers of two"),
        (("--chunked-prefill-size", "16"), "got 16"),
        (("--grace-period", "nan"), "got nan"),
        (("--grace-period", "-1"), "got -1"),
        (("--dtype", "int8"), "got 'int8', allowed is auto, float32, bfloat16"),
        (("--kernels", "fast"), "got 'fast', allowed is auto, all, reference"),
        (("--log-level", "loud"), "got 'loud'"),
        (("--disable-radix-cache", "maybe"), "got 'maybe', allowed is true and false"),
        (
            ("--speculative-algorithm", "medusa"),
            "got 'medusa', allowed are NONE, DFLASH, DDTREE",
        ),
        (("--speculative-ddtree-budget", "1025"), "got 1025"),
        (("--mesh", "2y2"), "mesh: got '2y2'"),
        (("--model-path", ""), "model-path: got an empty text"),
        (("--host", ""), "host: got an empty text"),
        (("--metrics-port", "50051"), "metrics-port: got 50051, which is the gRPC port"),
        (("--port", "1", "--port", "1"), "argument --port: given twice"),
        (("--config", "a", "--config", "b"), "argument --config: given twice"),
        (("--config", "/no/such/file"), "config: /no/such/file cannot be read"),
    ],
)
def test_a_value_that_is_not_allowed(argv, named):
    with pytest.raises(ValueError) as caught:
        parse(*argv)
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot = 1", "got the key 'prot'; allowed are model-path"),
        ("max_running_requests = 1", "got the key 'max_running_requests'"),
        ("[server]\nport = 1", "got the key 'server'"),
        ("config = 'x'", "got the key 'config'"),
        ("dry-run = true", "got the key 'dry-run'"),
        ("port = '1'", "port: got '1', allowed is an integer in [0, 65535]"),
        ("port = true", "port: got True"),
        ("port = 1.0", "port: got 1.0"),
        ("port = 99999", "port: got 99999"),
        ("host = 1", "host: got 1, allowed is a text"),
        ("disable-radix-cache = 1", "got 1, allowed is true and false"),
        ("grace-period = inf", "got inf"),
        ("model-path = ['a']", "got ['a']"),
        ("port = 1\nport = 2", "expected TOML"),
        ("port: 1", "expected TOML"),
        ("x = " + "[" * 5000, "expected TOML"),
        (b"\xff", "not UTF-8 text (byte 0)"),
        (b" " * (config.MAX_CONFIG_BYTES + 1), "longer than"),
    ],
)
def test_a_file_that_is_not_allowed(tmp_path, text, named):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        read_config_file(path)
    assert named in str(caught.value) and str(caught.value).startswith(f"config: {path}")


IGNORED = [
    ({"speculative_algorithm": "DFLASH", "speculative_ddtree_budget": 8}, "DFLASH does not branch"),
    ({"speculative_algorithm": "NONE", "speculative_ddtree_budget": 8}, "NONE does not branch"),
    ({"speculative_algorithm": "NONE", "speculative_num_draft_tokens": 16}, "NONE has no drafter"),
    ({"speculative_algorithm": "NONE", "speculative_draft_model_path": "/d"}, "NONE has no drafter"),
    (
        {"speculative_algorithm": "DFLASH", "speculative_ddtree_allow_hybrid_unsafe": True},
        "allow-hybrid-unsafe: got True, but algorithm DFLASH does not branch",
    ),
    (
        {"speculative_ddtree_budget": 1, "speculative_ddtree_allow_hybrid_unsafe": True},
        "DDTREE with budget 1 does not branch",
    ),
    ({"model_path": "/t", "speculative_ddtree_budget": 8}, "NONE does not branch"),
    ({"ssl_keyfile": "/k"}, "ssl-keyfile: got '/k', but there is no ssl-certfile"),
    ({"ssl_ca_certs": "/c"}, "ssl-ca-certs: got '/c', but there is no ssl-certfile"),
    ({"ssl_certfile": "/c"}, "a certificate without its key"),
]


@pytest.mark.parametrize(("changes", "named"), IGNORED)
def test_what_would_be_ignored_is_refused(changes, named):
    with pytest.raises(ValueError) as caught:
        ServerConfig(**changes)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_regression_g79_flags_run_together_or_unknown_fail():
    """A missing comma once made one word of two flags, and the algorithm was never set."""
    for wrong in ("--speculative-algorithmDDTREE--port=1", "--speculative-ddtree-budgets=4", "--speculative"):
        with pytest.raises(ValueError, match="unrecognized arguments"):
            parse(wrong)
    with pytest.raises(ValueError, match="speculative-algorithm: got 'DDTREE--port=1'"):
        parse("--speculative-algorithm=DDTREE--port=1")


@pytest.mark.parametrize("name", ["DDTREE", "dflash"])
def test_regression_h82_a_drafting_algorithm_without_a_drafter_is_refused(name):
    """It must neither start without the tree nor fail at the first request."""
    with pytest.raises(ValueError) as caught:
        parse("--model-path", "/t", "--speculative-algorithm", name)
    assert f"got {name.upper()}, which needs a drafter" in str(caught.value) and "/t" in str(caught.value)
    assert parse("--model-path", "/t", "--speculative-algorithm", name, "--drafter", "/d").has_drafter


def test_the_default_algorithm_follows_the_drafter():
    assert ServerConfig().algorithm is SpeculativeAlgorithm.DDTREE
    assert ServerConfig(model_path="/t").algorithm is SpeculativeAlgorithm.NONE
    made = ServerConfig(model_path="/t", speculative_draft_model_path="/d")
    assert made.algorithm is SpeculativeAlgorithm.DDTREE and made.model_name == "/t"


def test_refusals_read_the_capability_table(monkeypatch):
    """With other rows the same flags are allowed or refused: no name of an algorithm is compared."""
    rows = dict(ddtree_jax.algorithm.CAPABILITIES)
    dflash, ddtree = SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.DDTREE
    monkeypatch.setitem(ddtree_jax.algorithm.CAPABILITIES, dflash, rows[ddtree])
    assert ServerConfig(speculative_algorithm="DFLASH", speculative_ddtree_budget=8).algorithm is dflash
    monkeypatch.setitem(ddtree_jax.algorithm.CAPABILITIES, ddtree, rows[SpeculativeAlgorithm.NONE])
    with pytest.raises(ValueError, match="DDTREE does not branch"):
        ServerConfig(speculative_ddtree_budget=8)
