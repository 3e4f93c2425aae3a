"""HOW MUCH each contribution counts."""
