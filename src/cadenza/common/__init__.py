"""What every room may use: numbers about tensors, and questions to torch's process groups."""
