"""The exceptions that preparation of data raises."""


class DataError(ValueError):
    """The text or an option cannot be used; the message is one line for the user."""
