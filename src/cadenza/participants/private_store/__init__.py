"""A store that asks who comes: without the secret nobody reads, writes or stays; see `frames` for how that is shown."""
