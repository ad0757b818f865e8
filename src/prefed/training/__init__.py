"""How a run trains: the loop over rounds, the round itself, and where clients compute."""
