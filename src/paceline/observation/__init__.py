"""Records scripts of plain torch.distributed: DDP, FSDP, DTensor, torch's pipelines. They join no team.

`PACELINE_RUN=runs/NAME` in the environment, or `paceline run` with a script that does not call `join`, and the backend
"paceline".
"""
