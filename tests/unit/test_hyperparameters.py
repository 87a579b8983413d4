import itertools
import math

import pytest
import torch

from paceline.errors import UsageError
from paceline.parameters.hyperparameters import SLOT, Hyperparameters, RateScaling

# -- rate scaling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "full"), [(None, 1.0), ("linear", 9.0), ("sqrt", 3.0)])
def test_the_full_factor_follows_the_rule(rule: str | None, full: float) -> None:
    scaling = RateScaling(rule, 9, warmup=0)
    assert [scaling.factor(update) for update in (0, 1, 1000)] == [full] * 3


@pytest.mark.parametrize("rule", [None, "linear", "sqrt"])
def test_a_team_of_one_keeps_its_rate(rule: str | None) -> None:
    scaling = RateScaling(rule, 1, warmup=5)
    assert [scaling.factor(update) for update in range(10)] == [1.0] * 10


@pytest.mark.parametrize(("rule", "full"), [("linear", 4.0), ("sqrt", 2.0)])
def test_warmup_leads_to_the_full_factor_in_equal_steps(rule: str, full: float) -> None:
    scaling = RateScaling(rule, 4, warmup=9)
    factors = [1.0, *(scaling.factor(update) for update in range(12))]
    steps = [after - before for before, after in itertools.pairwise(factors)]
    assert steps[:10] == pytest.approx([(full - 1) / 10] * 10)
    assert factors[10:] == [full] * 3


def test_without_a_rule_there_is_no_warmup() -> None:
    assert RateScaling(None, 8, warmup=100).factor(0) == 1.0


def test_an_unknown_rule_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="scale_lr is 'square'; it must be one of None, 'linear', 'sqrt'"):
        RateScaling("square", 2, 0)


def test_a_negative_warmup_is_refused() -> None:
    with pytest.raises(UsageError, match="warmup is -1; it must be a number of updates, 0 or more"):
        RateScaling("linear", 2, -1)


# -- values of one worker for all ------------------------------------------------------------------------------------


def team_of(*optimizers: torch.optim.Optimizer) -> list[Hyperparameters]:
    slots = [memoryview(bytearray(SLOT)) for _ in optimizers]
    return [Hyperparameters(optimizer, slots, rank) for rank, optimizer in enumerate(optimizers)]


def adam(**options: object) -> torch.optim.Adam:
    first, second = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.5, "weight_decay": 0.1}]
    return torch.optim.Adam(groups, **options)  # type: ignore[arg-type]


def test_the_others_read_what_was_published() -> None:
    lead, other = team_of(adam(lr=0.25, betas=(0.8, 0.95)), adam())
    first, second = other.read(0, lead.publish())
    assert (first["lr"], second["lr"]) == (0.25, 0.5)
    assert (first["weight_decay"], second["weight_decay"]) == (0, 0.1)
    assert (first["eps"], first["amsgrad"], first["maximize"]) == (1e-8, False, False)


def test_tuples_stay_tuples() -> None:
    lead, other = team_of(adam(betas=(0.8, 0.95)), adam())
    assert [group["betas"] for group in other.read(0, lead.publish())] == [(0.8, 0.95)] * 2


def test_every_number_arrives_with_all_its_bits() -> None:
    rate = math.nextafter(0.1, 1.0)
    lead, other = team_of(adam(lr=rate), adam())
    assert other.read(0, lead.publish())[0]["lr"] == rate


def test_neither_parameters_nor_how_torch_computes_travel() -> None:
    lead, other = team_of(adam(foreach=True), adam())
    for group in other.read(0, lead.publish()):
        assert not {"params", "param_names", "fused", "foreach", "capturable"} & set(group)


def test_nothing_is_written_while_nothing_changes() -> None:
    lead, other = team_of(adam(), adam())
    number = lead.publish()
    before = other.read(0, number)
    assert [lead.publish() for _ in range(5)] == [number] * 5
    assert other.read(0, number) is before


def test_a_changed_rate_is_published_anew() -> None:
    optimizer = adam(lr=0.1)
    lead, other = team_of(optimizer, adam())
    number = lead.publish()
    assert other.read(0, number)[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.01
    changed = lead.publish()
    assert changed != number
    assert [group["lr"] for group in other.read(0, changed)] == [0.01, 0.5]


def test_a_rate_kept_in_a_tensor_and_changed_in_place_is_seen() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    lead, other = team_of(adam(lr=rate), adam())
    assert other.read(0, lead.publish())[0]["lr"] == 0.5
    rate.fill_(0.125)
    assert other.read(0, lead.publish())[0]["lr"] == 0.125


def test_a_rate_that_becomes_a_tensor_later_is_seen_to_change() -> None:
    optimizer = adam(lr=0.5)
    lead, other = team_of(optimizer, adam())
    lead.publish()
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.5)
    lead.publish()
    rate.fill_(0.25)
    assert other.read(0, lead.publish())[0]["lr"] == 0.25


def test_betas_in_a_list_changed_in_place_are_seen() -> None:
    optimizer = adam()
    optimizer.param_groups[0]["betas"] = betas = [0.9, 0.99]
    lead, other = team_of(optimizer, adam())
    assert other.read(0, lead.publish())[0]["betas"] == (0.9, 0.99)
    betas[0] = 0.5
    assert other.read(0, lead.publish())[0]["betas"] == (0.5, 0.99)


def test_each_worker_s_values_are_kept_apart() -> None:
    optimizers = [adam(lr=0.1), adam(lr=0.2), adam(lr=0.3)]
    team = team_of(*optimizers)
    numbers = [member.publish() for member in team]
    for member in team:
        assert [member.read(rank, number)[0]["lr"] for rank, number in enumerate(numbers)] == [0.1, 0.2, 0.3]


def test_groups_too_large_to_share_are_refused_with_the_limit() -> None:
    optimizer = adam()
    optimizer.param_groups[0]["table"] = [0.123456789] * 10_000
    with pytest.raises(UsageError, match=f"{SLOT - 8} are allowed"):
        team_of(optimizer)[0].publish()
