"""koila: a training step that fits in memory, with exactly the gradients of the full batch."""
