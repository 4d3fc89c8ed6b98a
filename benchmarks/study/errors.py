"""The exceptions of a study."""


class StudyError(ValueError):
    """A matrix, a result or a page cannot be used; the message is one line for the user."""
