"""The errors and warnings that a caller may see; a bad argument is a plain `ValueError`.

Each message names what was wrong, what was found and what would be right, in one line.
"""


def one_line(error: object, limit: int = 300) -> str:
    """The words of an error or a message without its line breaks, cut to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shown(value: object, limit: int = 200) -> str:
    """`repr` for a message: cut to `limit` characters, and of an integer too long for Python to write out as well."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of more than some thousand digits
        return f"{type(value).__name__} with a number of thousands of digits"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class CheckpointError(Exception):
    """A model folder cannot be used: a file, config key, tensor, shape or pairing is missing or misfits."""


class UnsupportedRequestError(Exception):
    """The chosen algorithm or model cannot do what was asked; the message names both."""


class InvariantError(Exception):
    """A bug in this program: a state that admission should have made impossible."""


class HybridStateWarning(UserWarning):
    """Output may differ from plain decoding: a branching tree runs over recurrent layers that follow slot order."""
