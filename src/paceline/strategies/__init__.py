"""How a team trains one model. Each strategy is one file and one line here."""

from paceline.config import AllReduce, Pipeline, Strategy
from paceline.policies import POLICIES
from paceline.strategies.all_reduce import AllReduceTrainer
from paceline.strategies.base import Options, Surroundings, Trainer
from paceline.strategies.parameter_server import ParameterServerTrainer
from paceline.strategies.pipeline import PipelineTrainer

TRAINERS: dict[type[Strategy], type[Trainer]] = {
    AllReduce: AllReduceTrainer,
    Pipeline: PipelineTrainer,
    **dict.fromkeys(POLICIES, ParameterServerTrainer),
}

__all__ = ["TRAINERS", "Options", "Surroundings", "Trainer"]
