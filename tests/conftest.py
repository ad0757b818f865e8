from __future__ import annotations

import os

import torch
from hypothesis import settings

# Tests run side by side on small problems: more threads only get into each other's way.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

settings.register_profile("prefed", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("prefed")
