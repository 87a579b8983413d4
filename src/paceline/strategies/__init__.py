"""How a team trains one model. Each strategy is one file and one line here."""

from paceline.config import AllReduce, Strategy
from paceline.strategies.all_reduce import AllReduceTrainer
from paceline.strategies.base import Options, Surroundings, Trainer

TRAINERS: dict[type[Strategy], type[Trainer]] = {
    AllReduce: AllReduceTrainer,
}

__all__ = ["TRAINERS", "Options", "Surroundings", "Trainer"]
