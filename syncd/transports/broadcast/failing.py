"""What a thread of its own has failed with, kept for whoever waits for it."""


class Failure:
    """An error that is told once, and then let go of.

    What is raised refers to whoever asked for it, and so to what keeps it: a circle, in which the connections of a
    group would stay open until the next collection.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def keep(self, error: BaseException | None) -> None:
        """Keep an error; None forgets the one that is kept."""
        self._error = error

    def tell(self) -> None:
        """Raise what is kept, once.

        Raises:
            BaseException: Whatever the thread has failed with.
        """
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error
