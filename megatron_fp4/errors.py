"""The one exception that is meant for the user's eyes."""


class ConfigError(ValueError):
    """A mistake in what the user asked for: one line that says what is wrong and what to do."""
