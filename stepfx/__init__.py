"""stepfx."""
