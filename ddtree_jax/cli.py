"""The command line: `ddtree-jax generate | serve | client | bench | doctor | convert`.

Exit status: 0 done; 2 bad usage or input, with exactly one line on stderr; 1 a fault of the program, with its
traceback; 130 interrupted; 141 the reader of stdout went away.
"""

import argparse
import errno
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import ddtree_jax
from ddtree_jax.algorithm import ALLOW_HYBRID_UNSAFE, SpeculativeAlgorithm, spoils_recurrent_state
from ddtree_jax.cli_engine import (
    add_engine_options,
    add_model_options,
    add_progress_option,
    load_engine,
    mesh_sizes,
    print_error,
    progress_writer,
)
from ddtree_jax.cli_grammar import add_grammar_options, grammar_of
from ddtree_jax.cli_prompt import add_prompt_options, add_sampling_options, prompt_of, token_id_list
from ddtree_jax.cli_serve import add_client, add_serve
from ddtree_jax.errors import CheckpointError, UnsupportedRequestError

if TYPE_CHECKING:
    from ddtree_jax.engine import Engine

OK, FAULT, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

# what a caller can cause; everything else is a fault of the program
_INPUT_ERRORS = (ValueError, CheckpointError, UnsupportedRequestError)
# the place that stdout goes to is full or gone
_OUTPUT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG)


class _UsageError(Exception):
    """Bad usage, found by the parser."""


class _Parser(argparse.ArgumentParser):
    """Reports bad usage by an exception: argparse would print a usage block and exit."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    if hasattr(sys.stdout, "reconfigure"):
        # A model may write any character, and a terminal need not be able to show it.
        sys.stdout.reconfigure(errors="replace")
    # Remarks of JAX and XLA about the platform would break the rule of one line on stderr; `doctor` has them.
    logging.getLogger("jax").setLevel(logging.ERROR)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        if sys.stdout is None:
            raise _UsageError("stdout is closed; there is nowhere to write")
        try:
            arguments = _parser().parse_args(argv)
        except SystemExit:  # --help or --version, printed
            status = OK
        else:
            status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; let that go nowhere.
        _discard_stdout()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _OUTPUT_ERRNOS:
            return _report_fault()
        _discard_stdout()
        print_error(error)
        return BAD_INPUT
    except (_UsageError, *_INPUT_ERRORS) as error:
        print_error(error)
        return BAD_INPUT
    except Exception:
        return _report_fault()


def _report_fault() -> int:
    traceback.print_exc()
    print("ddtree-jax: this is a fault of the program, please report it", file=sys.stderr)
    return FAULT


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddtree-jax",
        description="Lossless tree speculative decoding in JAX.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ddtree-jax {ddtree_jax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_generate(commands)
    add_serve(commands)
    add_client(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_convert(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        allow_abbrev=False,
        help="continue a prompt and stream the text",
        description="Streams the continuation of PROMPT to stdout, then prints one line of statistics.",
    )
    add_prompt_options(parser)
    names = ", ".join(member.value for member in SpeculativeAlgorithm)
    parser.add_argument("--algorithm", default="ddtree", metavar="NAME", help=f"{names}; default ddtree")
    parser.add_argument(
        "--budget",
        type=_budget,
        default=32,
        metavar="N",
        help="tree nodes besides the root (ddtree); default 32",
    )
    add_sampling_options(parser)
    add_grammar_options(parser)
    parser.add_argument("--show-tree", action="store_true", help="draw the last round's tree and its accepted path")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the stream")
    add_engine_options(parser)
    parser.set_defaults(run=_run_generate)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="acceptance length and speed of every algorithm, against none in the same run",
        description=(
            "Runs none, dflash and ddtree at several budgets on the shipped held-out prompts, "
            "checks that every output is the one of none, and prints a table."
        ),
    )
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="first N held-out prompts; default 8")
    parser.add_argument("--prompt-file", metavar="FILE", help="JSON list of objects with 'prompt'; default: shipped")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="default 96")
    parser.add_argument(
        "--budgets",
        type=_budget_list,
        default=(4, 8, 16, 32, 64),
        metavar="LIST",
        help="default 4,8,16,32,64",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="prompts decoded together; default 1")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0 (greedy)")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="timed runs of each row, medians shown; default 3"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_grammar_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=_run_bench)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="what this installation can do, and what is missing",
        description=(
            "Reports versions, devices, which kernels are used, and the shipped pair. Status 1: something needed is "
            "missing. With --target, reports instead what that folder holds and the memory that it needs, from its "
            "headers alone. With --kernels, checks and times every kernel on this GPU and writes a report to send; "
            "status 1: a kernel is wrong."
        ),
    )
    add_model_options(parser)
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of a cache; default 4096")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences decoded together; default 1")
    parser.add_argument("--kernels", action="store_true", help="check and time every kernel; needs a GPU")
    parser.add_argument(
        "--json",
        nargs="?",
        const=True,
        default=None,
        metavar="FILE",
        help="print one JSON object; with --kernels and FILE, write it there (default kernels-report.json)",
    )
    parser.set_defaults(run=_run_doctor)


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        allow_abbrev=False,
        help="write a model so that it loads faster, or smaller",
        description=(
            "orbax: loads a target, or a pair, and writes it as Orbax checkpoints in the layout of its parameters: "
            "OUTPUT, or OUTPUT/target and OUTPUT/drafter. They load as any folder does, on any number of devices. "
            "nvfp4: writes an HF-format target whose routed experts are NVFP4, in the layout of ModelOpt."
        ),
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make; new, or empty")
    parser.add_argument("--format", default="orbax", choices=("orbax", "nvfp4"), help="default orbax")
    add_model_options(parser)
    add_progress_option(parser)
    parser.set_defaults(run=_run_convert)


def _budget(text: str) -> int | str:
    """An integer, or `auto`; whether the value is allowed is for the library to say."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed are an integer >= 0 and auto") from None


def _budget_list(text: str) -> tuple[int, ...]:
    budgets = tuple(dict.fromkeys(token_id_list(text)))
    if not budgets:
        raise argparse.ArgumentTypeError("got no budget; give at least one")
    return budgets


def _run_generate(arguments: argparse.Namespace) -> int:
    from ddtree_jax.requests import check_arguments, check_request

    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "algorithm": arguments.algorithm,
        "budget": arguments.budget,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "seed": arguments.seed,
        "stop_token_ids": arguments.stop_token_ids,
        "grammar": grammar_of(arguments),
    }
    # Bad arguments that need no model are told before the weights load.
    prompt = prompt_of(arguments, sys.stdin)
    asked = check_arguments(**options)
    if arguments.allow_hybrid_unsafe and not spoils_recurrent_state(asked.algorithm, asked.budget):
        raise _UsageError(
            f"argument {ALLOW_HYBRID_UNSAFE}: algorithm {asked.algorithm.name} with budget {asked.budget} does not "
            "branch and would ignore it"
        )
    progress = progress_writer(arguments.progress)
    engine = load_engine(arguments, progress, lambda engine: check_request(engine, prompt, **options))
    chunks = ddtree_jax.stream(engine, prompt, **options, with_tree=arguments.show_tree, progress=progress)
    out = sys.stdout
    pieces: list[str] = []
    token_ids: list[int] = []
    last_tree = None
    last = None
    for chunk in chunks:
        last = chunk
        last_tree = chunk.tree or last_tree
        token_ids.extend(chunk.token_ids)
        # Without a tokenizer the ids are the output.
        text = chunk.text if chunk.text is not None else "".join(f"{token_id} " for token_id in chunk.token_ids)
        pieces.append(text)
        if not arguments.json:
            out.write(text)
            out.flush()
    if last is None or last.stats is None:
        raise RuntimeError("the stream ended without statistics")

    drawing = _drawing(engine, last_tree) if arguments.show_tree else None
    if arguments.json:
        document = {
            "text": "".join(pieces) if engine.tokenizer is not None else None,
            "token_ids": token_ids,
            "finish_reason": last.finish_reason,
            "stats": last.stats.to_dict(),
        }
        if last.error is not None:
            document["error"] = last.error
        if arguments.show_tree:
            document["tree"] = drawing
        print(json.dumps(document), file=out)
        return _status(last)
    if not "".join(pieces).endswith("\n"):
        out.write("\n")
    if arguments.show_tree:
        out.write(f"\n{drawing}\n\n")
    print(last.stats.summary_line(), file=out)
    return _status(last)


def _status(last: "ddtree_jax.Chunk") -> int:
    """Of a finished stream: an output that could not go on is told on stderr."""
    if last.error is None:
        return OK
    sys.stdout.flush()
    print_error(last.error)
    return BAD_INPUT


def _drawing(engine: "Engine", last_tree: Any) -> str:
    if last_tree is None:
        return "(no round was needed, so there is no tree)"
    from ddtree_jax import viz

    token_text = engine.tokenizer.token_text if engine.tokenizer is not None else None
    return viz.ascii_tree(last_tree.tree, last_tree.path, token_text, batch_index=last_tree.batch_index)


def _run_bench(arguments: argparse.Namespace) -> int:
    from ddtree_jax import bench

    settings = bench.BenchSettings(
        prompts=arguments.prompts,
        max_new_tokens=arguments.max_new_tokens,
        budgets=arguments.budgets,
        batch=arguments.batch,
        temperature=arguments.temperature,
        repeats=arguments.repeats,
        prompt_file=arguments.prompt_file,
        grammar=grammar_of(arguments),
    )
    progress = progress_writer(arguments.progress)
    engine = load_engine(arguments, progress, lambda engine: bench.check(engine, settings))
    report = bench.run_bench(engine, settings, progress=progress)
    print(json.dumps(report.to_dict()) if arguments.json else report.table())
    # In bfloat16, passes of different widths may round a near-tie differently; in float32 that is a fault.
    return FAULT if report.dtype == "float32" and not report.all_identical else OK


def _run_doctor(arguments: argparse.Namespace) -> int:
    from ddtree_jax import doctor

    folder_options = (arguments.drafter, arguments.mesh, arguments.dtype, arguments.context, arguments.batch)
    if arguments.target is None and folder_options != (None, None, "auto", 4096, 1):
        raise _UsageError("argument --target: needed beside --drafter, --mesh, --dtype, --context and --batch")
    if arguments.kernels:
        if arguments.target is not None:
            raise _UsageError("argument --kernels: not allowed with --target")
        return _run_doctor_kernels(arguments.json)
    if isinstance(arguments.json, str):
        raise _UsageError("argument --json: takes a FILE only with --kernels")
    if arguments.target is not None:
        folders = doctor.examine_folders(
            arguments.target,
            arguments.drafter,
            dtype=arguments.dtype,
            mesh_sizes=mesh_sizes(arguments),
            context=arguments.context,
            batch=arguments.batch,
        )
        print(json.dumps(folders.to_dict()) if arguments.json else folders.text())
        return OK
    report = doctor.examine()
    print(json.dumps(report.to_dict()) if arguments.json else report.text())
    return OK if report.healthy else FAULT


def _run_doctor_kernels(json_option: str | bool | None) -> int:
    from ddtree_jax import doctor

    file = json_option if isinstance(json_option, str) else "kernels-report.json"
    folder = os.path.dirname(file) or "."
    # Told before minutes of measuring, not after.
    if not file or file.endswith(".md") or os.path.isdir(file) or not os.access(folder, os.W_OK):
        raise _UsageError(f"argument --json: cannot write {file!r}")
    report = doctor.examine_kernels(lambda text: print(f"ddtree-jax: {text}", file=sys.stderr, flush=True))
    print(json.dumps(report.to_dict()) if json_option is True else report.text())
    paths = report.write(file)
    if json_option is not True:
        print("wrote " + " and ".join(str(path) for path in paths))
    return OK if report.healthy else FAULT


def _run_convert(arguments: argparse.Namespace) -> int:
    target = "demo" if arguments.target is None else arguments.target
    progress = progress_writer(arguments.progress)
    if arguments.format == "nvfp4":
        if (arguments.drafter, arguments.mesh, arguments.dtype) != (None, None, "auto"):
            raise _UsageError("argument --format: nvfp4 takes --target and --output alone")
        from ddtree_jax.engine import pair_names
        from ddtree_jax.quantise import quantise_target

        print(quantise_target(pair_names(target, None)[0], arguments.output, progress=progress).summary())
        return OK
    from ddtree_jax import converted

    sizes = mesh_sizes(arguments)
    mesh = None if sizes is None else ddtree_jax.make_mesh(*sizes)
    done = converted.convert(
        target, arguments.drafter, arguments.output, dtype=arguments.dtype, mesh=mesh, progress=progress
    )
    for one in done:
        print(one.line())
    return OK
