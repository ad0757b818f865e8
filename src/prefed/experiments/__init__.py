"""Runs on disk and many of them: configs, directories, checkpoints, sweeps, studies."""
