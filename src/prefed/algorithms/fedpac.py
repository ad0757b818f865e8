from typing import Any, Literal

from pydantic import field_validator

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.pair import RuleOption
from prefed.algorithms.sharing import Policy, average
from prefed.core.schedule import Rate
from prefed.rules import RULES, Fraction, Rule
from prefed.rules.soap import SOAP

PRECONDITIONERS = {"soap": "P", "sophia": "h", "muon": "momentum"}
"""The state that is averaged; of other rules, what they divide by."""


@ALGORITHMS.register("fedpac")
class FedPAC(Algorithm):
    """Liu et al. 2026, preconditioner alignment and correction: the clients' preconditioners are
    averaged and every round begins with their mean, and a step is (1 - align) times the client's
    own plus align times that of all clients in the last round.

    The state that is averaged is that of the curvature: SOAP's factors P (L and R), Sophia's h,
    Muon's momentum, and for another rule its v or P. All other state begins anew in each round.

    The paper is followed. Its code never computes Sophia's h (update_hessian is not called), and
    with SOAP leaves out the first step of every round; it also has weight decay, which is
    decoupled_weight_decay, and clipping, which is clip_norm=10.
    """

    client_lr: Rate = 0.003
    rule: RuleOption = SOAP()
    """The client rule: "soap", "sophia", "muon", or another with a preconditioner, such as "adam";
    or a table with its name and options."""
    align: Fraction = 0.5
    """The correction (beta in the paper): the share of each step that goes along the clients' mean
    change of the last round, which comes down with the weights and never goes up."""
    align_form: Literal["added", "mixed"] = "mixed"

    @field_validator("rule")
    @classmethod
    def _has_a_preconditioner(cls, rule: Rule) -> Rule:
        if _preconditioner(rule) is None:
            raise ValueError("it has no preconditioner to align; take soap, sophia, muon or adam")
        return rule

    def client_rule(self) -> Rule:
        return self.rule

    def sharing(self) -> dict[str, Policy]:
        name = _preconditioner(self.rule)
        return {str(name): average(), f"{name}_mass": average()}


def _preconditioner(rule: Rule) -> str | None:
    known: dict[Any, str] = {RULES.get(name): field for name, field in PRECONDITIONERS.items()}
    found = rule.preconditioner()
    return known.get(type(rule), None if found is None else found[0])
