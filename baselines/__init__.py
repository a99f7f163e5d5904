"""Alternatives to a fused kernel: one competitor per file."""
