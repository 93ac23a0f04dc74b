"""The one exception that means: the user can mend this."""

import re
import sys
from collections.abc import Callable
from typing import NoReturn

LONGEST = 1500  # characters of a message; its middle, some long value, is left out


class UserError(ValueError):
    """Bad input, named with path, value, rule and remedy. `run.py` prints it as one line and ends with code 2."""

    def __init__(self, message: object):
        super().__init__(one_line(str(message)))


def one_line(text: str) -> str:
    """Returns a text without breaks of lines, control characters or half surrogate pairs, of at most LONGEST."""
    text = re.sub(r"\s*[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]\s*", " ", text).strip()
    text = re.sub("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", lambda match: repr(match[0])[1:-1], text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 505]} ... {text[-500:]}"


def leave(main: Callable[[], int]) -> NoReturn:
    """Ends a script with the code of its `main`; as `run.py` does, with 2 and one line for a UserError."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
