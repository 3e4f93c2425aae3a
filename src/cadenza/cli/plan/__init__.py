"""`cadenza plan`: what period, codec and link will cost, before training."""

from cadenza.cli.plan.command import plan

__all__ = ["plan"]
