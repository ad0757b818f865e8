"""The device on which the oracle, engine and battery suites run: PREFED_TEST_DEVICE=cuda."""

import os

DEVICE = os.environ.get("PREFED_TEST_DEVICE", "cpu")
