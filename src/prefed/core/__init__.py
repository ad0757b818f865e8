"""What everything else stands on: errors, registries, flat vectors, keyed draws, safe files."""
