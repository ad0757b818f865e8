from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.core.schedule import Rate
from prefed.rules import SGD, Rule
from prefed.rules import Fraction as Fraction


@ALGORITHMS.register("fedavg")
class FedAvg(Algorithm):
    """McMahan et al. 2017: SGD on the clients, the mean on the server."""

    client_lr: Rate = 0.05
    client_momentum: Fraction = 0.0
    """The buffer begins at zero in each round."""
    server_momentum: Fraction = 0.0
    """Of the server's steps, from round to round."""

    def client_rule(self) -> Rule:
        return SGD(self.client_momentum)

    def server_rule(self) -> Rule:
        return SGD(self.server_momentum)


@ALGORITHMS.register("fedavgm")
class FedAvgM(FedAvg):
    """Hsu et al. 2019: FedAvg with momentum on the server."""

    server_momentum: Fraction = 0.9
