"""This machine: prefed against bare PyTorch loops on the same data, model and steps."""
