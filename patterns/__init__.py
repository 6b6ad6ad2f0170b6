"""Read-only questions to a Dynamo graph, answered with plain dataclasses."""
