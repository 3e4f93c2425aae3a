"""Hooks for DDP: the drop-in for torch's post-local SGD hook, and gradients in few bits; the others stay torch's."""
