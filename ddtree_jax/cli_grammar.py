"""The options of the command line that constrain the output, and the grammar that they give."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_jax.grammar import Grammar


def add_grammar_options(parser: argparse.ArgumentParser) -> None:
    """--json-schema, --regex, --lark and --choices (at most one of them), and --json-compact."""
    group = parser.add_argument_group("grammar", "what the output must match from end to end; at most one")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE", help="JSON text of this schema")
    one.add_argument("--regex", metavar="R", help="a regular expression (Rust syntax)")
    one.add_argument("--lark", metavar="FILE", help="a context-free grammar in llguidance's variety of Lark")
    one.add_argument("--choices", nargs="+", metavar="TEXT", help="one of these texts")
    group.add_argument("--json-compact", action="store_true", help="no white space between the tokens of the JSON text")


def grammar_of(arguments: argparse.Namespace) -> "Grammar | None":
    """The grammar of a command, None without one; ValueError for what is no grammar, or for a file of none."""
    if arguments.json_compact and arguments.json_schema is None:
        raise ValueError("--json-compact: needs --json-schema")
    given = (arguments.json_schema, arguments.regex, arguments.lark, arguments.choices)
    if all(one is None for one in given):
        return None
    from ddtree_jax.grammar import Grammar

    if arguments.json_schema is not None:
        text = _read("--json-schema", arguments.json_schema)
        return Grammar.json_schema(text, compact=arguments.json_compact)
    if arguments.lark is not None:
        return Grammar.lark(_read("--lark", arguments.lark))
    if arguments.regex is not None:
        return Grammar.regex(arguments.regex)
    return Grammar.choices(arguments.choices)


def _read(option: str, path: str) -> str:
    """The text of a file that the caller names, as far as any grammar may be long."""
    from ddtree_jax.grammar import MAX_GRAMMAR_BYTES

    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_GRAMMAR_BYTES + 1)
        if len(raw) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"{option}: {path} is longer than the {MAX_GRAMMAR_BYTES} bytes allowed")
        return raw.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: {path} is not UTF-8 text (byte {error.start})") from None
