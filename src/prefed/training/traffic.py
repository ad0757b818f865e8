"""The bytes that a round sends, down to its clients and up from them."""

from prefed.algorithms import Algorithm
from prefed.training.server_state import BUFFERS, Server, codec_of


def traffic(
    algorithm: Algorithm, server: Server, clients: int, steps: int, answers: int | None = None
) -> dict[str, int]:
    """Exact bytes of a round, over all its clients, split into weights and optimiser state.

    answers is how many of the clients sent something back: all of them unless told.
    """
    answers = clients if answers is None else answers
    sent = {
        name: codec_of(algorithm, name).nbytes(server.layout, like)
        for name, like in server.values(algorithm).items()
    }
    got = {name: value.nbytes for name, value in server.broadcast(algorithm).items()}
    weights_up, weights_down = (n.pop("weights") + n.pop(BUFFERS, 0) for n in (sent, got))
    up, down = sum(sent.values()), sum(got.values())
    if algorithm.client_rule().lockstep:  # a gradient up and the mean gradient down in each step
        down += steps * server.weights.nbytes
        up += steps * server.weights.nbytes
    return {
        "bytes_up": answers * (weights_up + up),
        "bytes_down": clients * (weights_down + down),
        "bytes_up_weights": answers * weights_up,
        "bytes_up_state": answers * up,
        "bytes_down_weights": clients * weights_down,
        "bytes_down_state": clients * down,
    }
