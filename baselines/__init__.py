"""What one would use instead of a fused kernel: one competitor per file."""
