"""What the paper's theory assumes and claims, measured: constants, bounds and noise."""
