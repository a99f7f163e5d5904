"""The timers."""
