"""What stepfx raises and warns with."""


class ConfigError(ValueError):
    """An option is unknown, has a bad value, or contradicts another."""


class StepfxWarning(UserWarning):
    """stepfx does less than was asked for; the text says what and why."""
