"""The flags of the server: the fields of `ServerConfig` are the options of the command line and the keys of a file."""

from __future__ import annotations

import argparse
import dataclasses
import math
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree_jax.algorithm import CAPABILITIES, MAX_BUDGET, SpeculativeAlgorithm, capabilities, spoils_recurrent_state
from ddtree_jax.errors import shown
from ddtree_jax.hub import DEMO_TARGETS
from serving.tls import TlsFiles

MAX_CONFIG_BYTES = 1 << 20
LOG_LEVELS = ("debug", "info", "warning", "error")


def _flag(
    default: Any,
    help: str,
    *,
    group: str,
    metavar: str | None = None,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    alias: str | None = None,
) -> Any:
    """One row of the table. Numbers are allowed in [low, high], None: no limit. alias: its name in other commands."""
    row = {"help": help, "group": group, "metavar": metavar, "low": low, "high": high, "choices": choices}
    row["alias"] = alias
    return dataclasses.field(default=default, metadata=row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server is started with. A field `max_running_requests` is the flag `--max-running-requests` and the key
    `max-running-requests` of a file; None is what the help calls the default.

    Raises ValueError for a value that is not allowed, and for a flag that the others would ignore.
    """

    model_path: str = _flag(
        "demo",
        "target folder or repository id, demo or demo-nvfp4",
        group="models",
        metavar="DIR",
        alias="target",
    )
    served_model_name: str | None = _flag(
        None, "name that clients see; default: --model-path", group="models", metavar="NAME"
    )
    dtype: str = _flag(
        "auto",
        "auto is float32 on CPU, bfloat16 on GPU",
        group="models",
        choices=("auto", "float32", "bfloat16"),
    )
    kernels: str = _flag(
        "auto",
        "auto: the kernels of a GPU on which they have been run; all: also where they have only been compiled; "
        "reference: plain JAX",
        group="models",
        choices=("auto", "all", "reference"),
    )
    mesh: str | None = _flag(
        None, "split over E x T devices: experts E ways, heads and widths T", group="models", metavar="ExT"
    )
    compilation_cache_dir: str | None = _flag(
        None, "folder that keeps compiled programs for the next start", group="models", metavar="DIR"
    )

    speculative_algorithm: str | None = _flag(
        None,
        "NONE, DFLASH or DDTREE, in any case; default DDTREE, without a drafter NONE",
        group="speculation",
        metavar="NAME",
    )
    speculative_draft_model_path: str | None = _flag(
        None,
        "drafter folder or repository id, for that target; demo and demo-nvfp4 bring theirs",
        group="speculation",
        metavar="DIR",
        alias="drafter",
    )
    speculative_num_draft_tokens: int | None = _flag(
        None, "the drafter's block size; another value is an error", group="speculation", metavar="N", low=1
    )
    speculative_ddtree_budget: int | None = _flag(
        None,
        "tree nodes besides the root; default 8 on a CPU, 32 elsewhere",
        group="speculation",
        metavar="N",
        low=0,
        high=MAX_BUDGET,
    )
    speculative_ddtree_allow_hybrid_unsafe: bool = _flag(
        False,
        "let the tree branch on a target whose recurrent layers cannot follow it: the text degrades",
        group="speculation",
    )

    max_running_requests: int = _flag(8, "requests decoded together", group="requests", metavar="N", low=1, high=256)
    max_queued_requests: int = _flag(
        256,
        "requests that may wait; one more is refused",
        group="requests",
        metavar="N",
        low=0,
        high=1_000_000,
    )
    context_length: int | None = _flag(
        None,
        "tokens of a request, prompt and output together; default: the model's positions, at most 4096",
        group="requests",
        metavar="N",
        low=2,
    )
    chunked_prefill_size: int = _flag(
        256,
        "prompt tokens that run between two rounds, a power of two",
        group="requests",
        metavar="N",
        low=32,
        high=8192,
    )
    constrained_json_disable_any_whitespace: bool = _flag(
        False, "JSON under a schema is compact: a model may go on with white space for ever", group="requests"
    )
    disable_radix_cache: bool = _flag(
        False, "compute every prompt from its start, also where a recent one began as it does", group="requests"
    )

    host: str = _flag("127.0.0.1", "address to listen at", group="network", metavar="HOST")
    port: int = _flag(50051, "gRPC port; 0 takes a free one", group="network", metavar="N", low=0, high=65535)
    ssl_certfile: str | None = _flag(None, "TLS: certificate chain of the server, PEM", group="network", metavar="FILE")
    ssl_keyfile: str | None = _flag(None, "TLS: its private key, PEM", group="network", metavar="FILE")
    ssl_ca_certs: str | None = _flag(
        None, "TLS: clients need a certificate of these authorities, PEM", group="network", metavar="FILE"
    )
    grace_period: float = _flag(
        30.0,
        "seconds that running requests have to finish after SIGTERM",
        group="network",
        metavar="S",
        low=0,
        high=86400,
    )

    metrics_port: int | None = _flag(
        None,
        "HTTP port of the Prometheus metrics, at --host; 0 takes a free one; default: no metrics",
        group="logs",
        metavar="N",
        low=0,
        high=65535,
    )
    log_level: str = _flag("info", "least severe messages on stderr", group="logs", choices=LOG_LEVELS)
    log_requests: str = _flag(
        "all", "which finished requests get a line on stderr", group="logs", choices=("all", "failed", "none")
    )

    def __post_init__(self) -> None:
        for option in OPTIONS:
            check_value(option, getattr(self, option.field), option.name)
        for name, value in (("model-path", self.model_path), ("host", self.host)):
            if not value:
                raise ValueError(f"{name}: got an empty text, allowed is a name")
        self.mesh_sizes  # noqa: B018 - raises for what is no mesh
        if self.chunked_prefill_size & (self.chunked_prefill_size - 1):
            raise ValueError(
                f"chunked-prefill-size: got {self.chunked_prefill_size}, allowed are powers of two from 32 to 8192"
            )
        self._check_speculation()
        self._check_network()

    def _check_speculation(self) -> None:
        member = self.algorithm
        row = capabilities(member)
        if row.needs_drafter and not self.has_drafter:
            able = ", ".join(other.name for other, columns in CAPABILITIES.items() if not columns.needs_drafter)
            raise ValueError(
                f"speculative-algorithm: got {member.name}, which needs a drafter; give one for {self.model_path} "
                f"(speculative-draft-model-path), or use {able}"
            )
        if not row.needs_drafter:
            for name in ("speculative-draft-model-path", "speculative-num-draft-tokens"):
                self._refuse_ignored(name, f"algorithm {member.name} has no drafter")
        if not row.branching:
            self._refuse_ignored("speculative-ddtree-budget", f"algorithm {member.name} does not branch")
        # Without a budget the default counts, and it branches.
        budget = 2 if self.speculative_ddtree_budget is None else self.speculative_ddtree_budget
        if not spoils_recurrent_state(member, budget):
            given = "" if self.speculative_ddtree_budget is None else f" with budget {budget}"
            self._refuse_ignored(
                "speculative-ddtree-allow-hybrid-unsafe", f"algorithm {member.name}{given} does not branch"
            )

    @property
    def tls(self) -> TlsFiles:
        """The TLS files. Raises ValueError for files that do not belong together."""
        return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    def _check_network(self) -> None:
        self.tls  # noqa: B018 - raises for files that do not belong together
        if self.metrics_port is not None and self.metrics_port == self.port != 0:
            raise ValueError(f"metrics-port: got {self.metrics_port}, which is the gRPC port; give another one")

    def _refuse_ignored(self, name: str, why: str) -> None:
        option = OPTION_BY_NAME[name]
        value = getattr(self, option.field)
        if value != option.default:
            raise ValueError(f"{name}: got {shown(value)}, but {why} and would ignore it; leave it out")

    @property
    def algorithm(self) -> SpeculativeAlgorithm:
        """The chosen algorithm, or the default of this pair."""
        if self.speculative_algorithm is not None:
            return _algorithm("speculative-algorithm", self.speculative_algorithm)
        return SpeculativeAlgorithm.DDTREE if self.has_drafter else SpeculativeAlgorithm.NONE

    @property
    def has_drafter(self) -> bool:
        """Whether there is a drafter for an algorithm that wants one."""
        return self.speculative_draft_model_path is not None or self.model_path in DEMO_TARGETS

    @property
    def model_name(self) -> str:
        """How clients call the model."""
        return self.model_path if self.served_model_name is None else self.served_model_name

    @property
    def mesh_sizes(self) -> tuple[int, int] | None:
        """(expert, tensor), None for one device."""
        if self.mesh is None:
            return None
        from ddtree_jax.cluster import parse_mesh  # not above: it imports JAX

        return parse_mesh(self.mesh)


@dataclasses.dataclass(frozen=True)
class Option:
    """A row of the table as its readers use it. kind: bool, int, float or str."""

    field: str
    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    group: str
    metavar: str | None
    low: float | None
    high: float | None
    choices: tuple[str, ...] | None
    alias: str | None

    @property
    def allowed(self) -> str:
        """The values, in words."""
        if self.kind is bool:
            return "true and false"
        if self.choices is not None:
            return ", ".join(self.choices)
        if self.kind is str:
            return "a text"
        what = "an integer" if self.kind is int else "a number"
        if self.high is not None:
            return f"{what} in [{self.low:g}, {self.high:.0f}]"
        return what if self.low is None else f"{what} >= {self.low:g}"

    @property
    def full_help(self) -> str:
        """The help, with the default where it does not say that itself."""
        if self.default is None or self.kind is bool:
            return self.help
        return f"{self.help}; default {self.default if self.kind is str else format(self.default, 'g')}"


def _options() -> tuple[Option, ...]:
    hints = typing.get_type_hints(ServerConfig)
    options = []
    for field in dataclasses.fields(ServerConfig):
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        options.append(
            Option(
                field=field.name,
                name=field.name.replace("_", "-"),
                kind=next(kind for kind in kinds if kind is not type(None)),
                optional=type(None) in kinds,
                default=field.default,
                **field.metadata,
            )
        )
    return tuple(options)


OPTIONS = _options()
OPTION_BY_NAME = {option.name: option for option in OPTIONS}


def _algorithm(where: str, value: str) -> SpeculativeAlgorithm:
    try:
        return SpeculativeAlgorithm.parse(value)
    except ValueError:
        names = ", ".join(member.name for member in SpeculativeAlgorithm)
        raise ValueError(f"{where}: got {shown(value)}, allowed are {names}, in any case") from None


def check_value(option: Option, value: Any, where: str) -> None:
    """Raises ValueError, beginning with `where`, unless the option may have the value."""
    if value is None and option.optional:
        return
    fits = type(value) is option.kind or (option.kind is float and type(value) is int)
    if fits and option.choices is not None:
        fits = value in option.choices
    elif fits and option.kind in (int, float):
        low = -math.inf if option.low is None else option.low
        high = math.inf if option.high is None else option.high
        fits = low <= value <= high and math.isfinite(value)
    if not fits:
        raise ValueError(f"{where}: got {shown(value)}, allowed is {option.allowed}")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Every row of the table, and --config. What is not given is absent from the parsed arguments."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        action=_Once,
        default=argparse.SUPPRESS,
        help="TOML file of the options below, without the leading dashes (port = 50051); the command line wins over it",
    )
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        shape: dict[str, Any] = {"metavar": option.metavar}
        if option.kind is bool:
            # With a value it can also take back what a file says.
            shape = {"nargs": "?", "const": True, "metavar": "true|false"}
        elif option.choices is not None:
            shape = {"metavar": "|".join(option.choices)}
        groups[option.group].add_argument(
            *(f"--{name}" for name in (option.name, option.alias) if name is not None),
            dest=option.field,
            action=_Once,
            type=_reader(option),
            default=argparse.SUPPRESS,
            help=option.full_help,
            **shape,
        )


class _Once(argparse.Action):
    """Refuses an option that is given twice: the first value would go unused."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise argparse.ArgumentError(self, "given twice")
        setattr(namespace, self.dest, values)


def _reader(option: Option) -> Any:
    """Text of the command line to a value that the option may have."""

    def read(text: str) -> Any:
        value: Any = text
        if option.kind is bool:
            value = {"true": True, "false": False}.get(text.lower(), text)
        elif option.kind in (int, float):
            try:
                value = option.kind(text)
            except ValueError:
                value = text
        try:
            check_value(option, value, option.name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None
        return value

    return read


def config_from(arguments: argparse.Namespace) -> ServerConfig:
    """The configuration of parsed arguments and of the file that they name. ValueError for what is not allowed."""
    given = {option.field: getattr(arguments, option.field) for option in OPTIONS if hasattr(arguments, option.field)}
    file = getattr(arguments, "config", None)
    return ServerConfig(**{**({} if file is None else read_config_file(file)), **given})


def read_config_file(path: str | Path) -> Mapping[str, Any]:
    """Field -> value of a TOML file, each of which its option may have; whether they go together is not checked.

    Raises ValueError: a file that cannot be read or is no TOML, a key twice, a key of no option, a value not allowed.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise ValueError(f"it is longer than the {MAX_CONFIG_BYTES} bytes allowed")
        document = tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ValueError(f"config: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"config: {path} is not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config: {path}: {error}; expected TOML such as max-running-requests = 8") from None
    values = {}
    for name, value in document.items():
        option = OPTION_BY_NAME.get(name)
        if option is None:
            raise ValueError(f"config: {path}: got the key {shown(name)}; allowed are {', '.join(OPTION_BY_NAME)}")
        check_value(option, value, f"config: {path}: {name}")
        values[option.field] = value
    return values
