"""One static HTML page about a model: no server, no script, no outside resource."""
