"""Graph in, graph out: one rewrite a file, in the order that stepfx.pipeline shows."""
