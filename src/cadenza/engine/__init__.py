"""The engine: runs a strategy on a model, round by round, among participants of whatever kind."""
