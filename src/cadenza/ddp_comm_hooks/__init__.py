"""The drop-in for torch's post-local SGD hook; the other hooks of `torch.distributed.algorithms` stay torch's."""
