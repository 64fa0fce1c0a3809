"""The options that name a prompt and how to sample, which `generate` and `client` share."""

import argparse
from typing import IO


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """PROMPT, --demo-prompt, --token-ids and --max-new-tokens."""
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text; - reads it from stdin")
    parser.add_argument(
        "--demo-prompt",
        type=int,
        metavar="N",
        help="use shipped held-out prompt N (0, 1, ...) instead of PROMPT",
    )
    parser.add_argument("--token-ids", action="store_true", help="PROMPT is token ids, separated by commas or spaces")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")


def add_sampling_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """--temperature, the filters, --seed and --stop-token-ids."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the smallest set of this probability")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the most probable one")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    group.add_argument(
        "--stop-token-ids",
        type=token_id_list,
        metavar="IDS",
        help="ids separated by commas, instead of the model's own end tokens; '' for none",
    )
    return group


def token_id_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed are integers separated by commas") from None


def prompt_of(arguments: argparse.Namespace, stdin: IO[str]) -> str | list[int]:
    """The prompt of a command, as text or token ids; ValueError where there is none or it is no text."""
    if (arguments.prompt is None) == (arguments.demo_prompt is None):
        raise ValueError("argument PROMPT: give either PROMPT (- for stdin) or --demo-prompt")
    if arguments.demo_prompt is not None:
        from ddtree_jax.bench import held_out_prompts

        prompts = held_out_prompts()
        if not 0 <= arguments.demo_prompt < len(prompts):
            raise ValueError(f"--demo-prompt: got {arguments.demo_prompt}; allowed are 0 to {len(prompts) - 1}")
        return prompts[arguments.demo_prompt]
    text = arguments.prompt
    if text == "-":
        try:
            if stdin is None:
                raise OSError("it is closed")
            raw = stdin.buffer.read() if hasattr(stdin, "buffer") else stdin.read().encode()
        except OSError as error:
            raise ValueError(f"PROMPT: stdin cannot be read: {error}") from None
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"PROMPT: stdin is not UTF-8 text (byte {error.start})") from None
    if arguments.token_ids:
        try:
            return token_id_list(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"PROMPT: {error}") from None
    return text
