"""Print what the package needs to run besides torch, a requirement on each line.

    python scripts/without_torch.py

For installers that do not find torch's build for CPUs: torch is installed before, by pip, and they
are not asked for it.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

with open(ROOT / "pyproject.toml", "rb") as file:
    needed = tomllib.load(file)["project"]["dependencies"]
for requirement in needed:
    if re.split(r"[^\w.-]", requirement)[0] != "torch":
        print(requirement)
