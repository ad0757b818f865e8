"""What works and is not recommended.

Here is what the project's own studies (docs/results.md, docs/upload.md) show to lose against a
simpler choice, and what nobody has shown to win yet. It is exact, tested and found by name like
everything else, but no default uses it, `prefed ls` does not list it, and it may go away with a
new minor version after a warning in the changelog. It comes back when a study with equal budgets
shows that it wins.
"""
