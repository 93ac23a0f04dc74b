"""The exception of this package."""


class PlacementError(ValueError):
    """A mesh, a table or a batch that cannot be placed; names the path, the numbers, the rule and the remedy."""
