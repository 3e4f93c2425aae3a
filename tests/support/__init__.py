"""What the tests share: rank processes, small models, and ways to compare tensors."""
