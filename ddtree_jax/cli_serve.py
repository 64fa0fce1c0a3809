"""`ddtree-jax serve` and `ddtree-jax client`; the packages of the extra `serving` are imported only by their runs."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from ddtree_jax.cli_engine import add_progress_option, print_error, progress_writer
from ddtree_jax.cli_grammar import add_grammar_options, grammar_of
from ddtree_jax.cli_prompt import add_prompt_options, add_sampling_options, prompt_of
from ddtree_jax.errors import UnsupportedRequestError
from serving.config import add_server_options, config_from

EXTRA = ("grpc", "grpc_health", "grpc_reflection", "prometheus_client", "smg_grpc_proto")
DEFAULT_SERVER = "127.0.0.1:50051"


def add_serve(commands: Any) -> None:
    """The subcommand `serve`."""
    parser = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="serve a pair over gRPC",
        description=(
            "Serves a pair as the gRPC service vllm.grpc.engine.VllmEngine. SIGTERM and Ctrl-C end it: what runs may "
            "finish within the grace period."
        ),
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be served, and exit")
    add_progress_option(parser)
    add_server_options(parser)
    parser.set_defaults(run=_run_serve)


def add_client(commands: Any) -> None:
    """The subcommand `client`."""
    parser = commands.add_parser(
        "client",
        allow_abbrev=False,
        help="continue a prompt on a server and stream the text",
        description="Streams the continuation of PROMPT from a server to stdout, then prints one line of statistics.",
    )
    add_prompt_options(parser)
    group = add_sampling_options(parser)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the output before this text; may be repeated"
    )
    add_grammar_options(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--server", default=DEFAULT_SERVER, metavar="HOST:PORT", help=f"default {DEFAULT_SERVER}")
    server.add_argument("--timeout", type=float, metavar="S", help="seconds until the server gives the request up")
    server.add_argument("--request-id", default="", metavar="ID", help="for the server's log; default: it makes one up")
    server.add_argument("--tls", action="store_true", help="TLS, with the authorities that this system trusts")
    server.add_argument("--ssl-ca-certs", metavar="FILE", help="TLS, with the authorities of this PEM file")
    server.add_argument("--ssl-certfile", metavar="FILE", help="TLS: certificate chain of this client, PEM")
    server.add_argument("--ssl-keyfile", metavar="FILE", help="TLS: its private key, PEM")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the stream")
    parser.set_defaults(run=_run_client)


def _require_extra() -> None:
    """Raises UnsupportedRequestError, with what to install, unless the packages of the extra are there."""
    for name in EXTRA:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UnsupportedRequestError(
                f"serve and client need the package {name}, which cannot be imported ({error}); "
                "pip install 'ddtree-jax[serving]'"
            ) from None


def _run_serve(arguments: argparse.Namespace) -> int:
    config = config_from(arguments)
    _require_extra()
    if arguments.dry_run:
        from serving.startup import check_start

        print(check_start(config).report())
        return 0
    from serving.launch import serve

    return serve(config, progress_writer(arguments.progress))


def _run_client(arguments: argparse.Namespace) -> int:
    prompt = prompt_of(arguments, sys.stdin)
    grammar = grammar_of(arguments)
    if arguments.timeout is not None and not 0 < arguments.timeout < float("inf"):
        raise ValueError(f"--timeout: got {arguments.timeout}, allowed is a number > 0")
    if not arguments.server:
        raise ValueError(f"--server: got an empty text, allowed is HOST:PORT such as {DEFAULT_SERVER}")
    _require_extra()
    import grpc

    from serving.client import Client, ServerError

    tls = _tls(arguments)
    try:
        with Client(arguments.server, tls=tls) as client:
            return _stream(client, prompt, grammar, arguments)
    except ServerError as error:
        sys.stdout.flush()
        if error.status in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS):
            print_error(f"{arguments.server}: {error}")
            return 1
        raise ValueError(f"{arguments.server}: {error}") from None


def _stream(client: Any, prompt: str | list[int], grammar: Any, arguments: argparse.Namespace) -> int:
    import grpc

    from serving.client import ServerError

    def start(*, detokenise: bool) -> Any:
        return client.generate(
            prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            seed=arguments.seed,
            stop=arguments.stop,
            stop_token_ids=arguments.stop_token_ids,
            grammar=grammar,
            request_id=arguments.request_id,
            timeout_s=arguments.timeout,
            detokenise=detokenise,
        )

    try:
        generation = start(detokenise=True)
    except ServerError as error:
        if error.status is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        generation = start(detokenise=False)  # it has no tokenizer: the ids are the output
    out = sys.stdout
    with generation:
        for piece in generation:
            if not arguments.json:
                out.write(piece)
                out.flush()
        result = generation.result
    if arguments.json:
        fields = ("text", "token_ids", "finish_reason", "matched_stop", "num_prompt_tokens", "num_cached_tokens")
        document = {name: getattr(result, name) for name in (*fields, "time_to_first_token_s", "total_s")}
        document["statistics"] = dict(result.statistics)
        if result.error is not None:
            document["error"] = result.error
        print(json.dumps(document), file=out)
    else:
        text = " ".join(map(str, result.token_ids)) if result.text is None else result.text
        if result.text is None:
            out.write(text)
        if not text.endswith("\n"):
            out.write("\n")
        print(result.summary_line(), file=out)
    if result.error is not None:
        raise ValueError(result.error)
    return 0


def _tls(arguments: argparse.Namespace) -> Any:
    from serving.client import Tls

    wanted = arguments.tls or arguments.ssl_ca_certs is not None
    if (arguments.ssl_certfile is None) != (arguments.ssl_keyfile is None):
        raise ValueError("--ssl-certfile, --ssl-keyfile: got one of them, allowed are both or none")
    if not wanted:
        if arguments.ssl_certfile is not None:
            raise ValueError("--ssl-certfile: got one without TLS; give --tls or --ssl-ca-certs as well")
        return None
    files = (arguments.ssl_ca_certs, arguments.ssl_keyfile, arguments.ssl_certfile)
    contents = []
    for name, path in zip(("--ssl-ca-certs", "--ssl-keyfile", "--ssl-certfile"), files, strict=True):
        try:
            contents.append(None if path is None else Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(f"{name}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return Tls(*contents)
