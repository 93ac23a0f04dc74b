"""The one exception that means: the user can mend this."""


class UserError(ValueError):
    """Bad input, named with path, value, rule and remedy. `run.py` prints it as one line and ends with code 2."""
