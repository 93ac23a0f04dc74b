"""The one exception that means: the user can mend this."""

import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(ValueError):
    """Bad input, named with path, value, rule and remedy. `run.py` prints it as one line and ends with code 2."""


def leave(main: Callable[[], int]) -> NoReturn:
    """Ends a script with the code of its `main`; as `run.py` does, with 2 and one line for a UserError."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
