"""Secure aggregation: the server learns the sum of what nodes send, and no node's part of it.

    stages        what the two sides say to each other, in four stages
    party         a node's side: its keys, shares and masks
    session       the server's side: from the nodes' answers to the sum
    masks         the pseudo-random numbers that hide a vector
    fixed_point   numbers as integers that add up exactly
    vector        an update as one vector of integers, and the mean from their sum
    node          the ClientApp's part in a deployed config
    secure_trainer  the ServerApp's

It is SecAgg+ (Bell et al. 2020; with everyone as neighbour, Bonawitz et al. 2017) as Flower has it
for its old API: docs/secure-aggregation.md says what follows it and what does not.
"""
