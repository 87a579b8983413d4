"""Pipeline parallelism: the path of a call is pipelined_model, batch_run, runtime, stage_runner, microbatch_loss."""
