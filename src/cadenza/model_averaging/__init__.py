"""The drop-in for `torch.distributed.algorithms.model_averaging`: same names and signatures, other insides."""
